"""Contradictions between a program's TrainingArguments and its DeepSpeed config, told with the places of both.

transformers compares them and raises a ValueError that has the values only.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from dsjob import document as documents
from dsjob import storage
from dsjob.document.places import describe_place
from dsjob.errors import ConfigError, DocumentError, Problem
from dsjob.programs.origins import Told, tell_origin

_LINE = re.compile(r"- ds (\S+?)=(.*) vs hf (.*?)=(.*)", re.DOTALL)
# The arguments from which the Trainer calculates a value.
_PARTS = {
    "train_batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "num_training_steps": ("max_steps", "num_train_epochs"),
}


def explain(lines: list[str], args: Any, told: Told) -> list[Problem]:
    """The contradictions that transformers found, as problems at their places in the config. lines: its own words."""
    found = []
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            return []  # a version with other words: its own error is shown
        key, value, name, other = match.groups()
        path = tuple(key.split("."))
        problem = Problem(f"{value}, but {_name(name)}={other} ({_place(name, args, told)})", path, "contradiction")
        source, at, column = told.origin.locate(path)
        hint = 'write "auto" here to use the argument, or make both equal'
        found.append(dataclasses.replace(problem, source=source, line=at, column=column, hint=hint))
    return found


def _name(name: str) -> str:
    """Rewrites names such as `adam_beta1+adam_beta2`, `fp16|fp16_full_eval`, `train_batch_size (calculated)`."""
    return name.replace("+", ", ").replace("|", " or ").removesuffix(" (calculated)")


def _place(name: str, args: Any, told: Told) -> str:
    words = re.findall(r"\w+", name)
    parts = _PARTS.get(words[0], ())
    each = {part: _place_argument(part, args, told) for part in parts or words if hasattr(args, part)}
    if parts:
        return "from " + ", ".join(f"{part}={getattr(args, part)}: {place}" for part, place in each.items())
    given = [place for part, place in each.items() if not place.startswith("the default")]
    return ", ".join(dict.fromkeys(given)) or "the default of TrainingArguments"


def _place_argument(name: str, args: Any, told: Told) -> str:
    """Where an argument of TrainingArguments is given: its value is there, so the program has not replaced it."""
    value = getattr(args, name)
    for at, word in enumerate(sys.argv):
        flag, equals, text = word.partition("=")
        following = "".join(sys.argv[at + 1 : at + 2])
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            shown = word if equals or following.startswith("--") else f"{word} {following}"
            if _is_read_as(text or following, value):
                return f"{shown} on the command line"
        elif at and word.endswith((".json", ".yaml", ".yml")) and os.path.isfile(word):
            with suppress(DocumentError):
                document = documents.parse(storage.read_text(word), word)
                if name in document.value and _is_read_as(str(document.value[name]), value):
                    return describe_place(document.locate((name,)))
    [default] = [field.default for field in dataclasses.fields(args) if field.name == name] or [None]
    return "the default of TrainingArguments" if value == default else describe_place((*told.line, 0))


def _is_read_as(text: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value == (text.lower() not in ("no", "false", "f", "n", "0"))  # a flag without a value is true
    try:
        return bool(float(text) == value)
    except ValueError:
        return text == str(value)


def install() -> None:
    """Replaces transformers' error. Called when transformers.integrations.deepspeed has been imported."""
    finalize: Callable[..., None] = HfTrainerDeepSpeedConfig.trainer_config_finalize

    def finalize_and_explain(self: Any, args: Any, model: Any, num_training_steps: Any) -> None:
        try:
            finalize(self, args, model, num_training_steps)
        except ValueError:
            told = tell_origin(self)
            if told is not None and self.mismatches and (problems := explain(self.mismatches, args, told)):
                raise ConfigError(problems) from None
            raise

    HfTrainerDeepSpeedConfig.trainer_config_finalize = finalize_and_explain  # type: ignore[method-assign]
