"""Contradictions between a program's TrainingArguments and its DeepSpeed config, told with the places of both.

transformers compares them and raises a ValueError that has the values only. It says nothing of an argument whose key is
missing in the config: DeepSpeed then uses a default of its own. Batch sizes have no default, so dsjob takes those of
TrainingArguments.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from dsjob import document as documents
from dsjob import storage
from dsjob.contract import schema as contract
from dsjob.contract.paths import get_at
from dsjob.document import Document
from dsjob.document.normal import settle_torch_adam
from dsjob.document.places import describe_place
from dsjob.errors import ConfigError, DocumentError, Problem, StorageError
from dsjob.programs.origins import Told, tell_origin

_MOST_BYTES = 100_000  # of a file of arguments
_LINE = re.compile(r"- ds (\S+?)=(.*) vs hf (.*?)=(.*)", re.DOTALL)
# The arguments from which the Trainer calculates a value.
_PARTS = {
    "train_batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "num_training_steps": ("max_steps", "num_train_epochs"),
}
# The keys into which transformers writes arguments, but only where a key is "auto". Each has a default of its own.
_FILLED = {
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_num_steps": ("warmup_steps", "warmup_ratio"),
}

_CALCULATED = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def explain(lines: list[str], args: Any, told: Told) -> list[Problem]:
    """The contradictions that transformers found, as problems at their places in the config. lines: its own words."""
    found = []
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            return []  # a version with other words: its own error is shown
        key, value, name, other = match.groups()
        path = tuple(key.split("."))
        place = _place(name, other, args, told)
        problem = Problem(f"{value}, but {_name(name)}={other} ({place})", path, "contradiction")
        source, at, column = told.origin.locate(path)
        hint = 'write "auto" here to use the argument, or make both equal'
        found.append(dataclasses.replace(problem, source=source, line=at, column=column, hint=hint))
    return found


def find_unused(config: dict[str, Any], args: Any, steps: int, told: Told) -> list[Problem]:
    """The arguments that somebody has given in vain: a section lacks their key, so its default is used instead.

    config: with the values that transformers has filled in. steps: of the whole training.
    """
    found = []
    defaults = settle_torch_adam({"optimizer": config.get("optimizer")})  # weight_decay depends on torch_adam
    for key, names in _FILLED.items():
        path = tuple(key.split("."))
        default = get_at(defaults, path, contract.find_at(contract.deepspeed_schema(), path, config).get("default"))
        section = config.get(path[0]) if len(path) > 1 else config
        if default is None or not isinstance(section, dict) or get_at(config, path, None) is not None:
            continue
        places = {name: _place_argument(name, args, told) for name in names if getattr(args, name, None) is not None}
        given = {name: place for name, place in places.items() if place != _name_default(args)}
        values = [getattr(args, name) for name in names if hasattr(args, name)]
        value = args.get_warmup_steps(steps) if "warmup_steps" in names else values if len(names) > 1 else values[0]
        if given and value != default:
            listed = ", ".join(f"{name}={getattr(args, name)} ({place})" for name, place in given.items())
            message = f"is missing, so its default of {default} would be used, but the program has {listed}"
            hint = f'add "{path[-1]}": "auto" to use the argument, or leave the argument out'
            source, at, column = told.origin.locate(path)
            found.append(Problem(message, path, "contradiction", hint, source, line=at, column=column))
    return found


def _name(name: str) -> str:
    """Rewrites names such as `adam_beta1+adam_beta2`, `fp16|fp16_full_eval`, `train_batch_size (calculated)`."""
    return name.replace("+", ", ").replace("|", " or ").removesuffix(" (calculated)")


def _place(name: str, value: str, args: Any, told: Told) -> str:
    words = re.findall(r"\w+", name)
    parts: tuple[str, ...] = _PARTS.get(words[0], ())
    if name == "warmup_steps" and value != str(args.warmup_steps):  # a share of all steps, or 0, which becomes 1
        parts = ("warmup_steps",)
    each = {part: _place_argument(part, args, told) for part in parts or words if hasattr(args, part)}
    if parts:
        return "from " + ", ".join(f"{part}={getattr(args, part)}: {place}" for part, place in each.items())
    given = [place for part, place in each.items() if place != _name_default(args)]
    return ", ".join(dict.fromkeys(given)) or _name_default(args)


def _name_default(args: Any) -> str:
    return f"the default of {type(args).__name__}"  # TRL's classes have other defaults than TrainingArguments


def _place_argument(name: str, args: Any, told: Told) -> str:
    """Where an argument of TrainingArguments is given: its value is there, so the program has not replaced it."""
    value, source = getattr(args, name), told.origin.locate(())[0]
    for at, word in enumerate(sys.argv):
        flag, equals, text = word.partition("=")
        following = "".join(sys.argv[at + 1 : at + 2])
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            shown = word if equals or following.startswith("--") else f"{word} {following}".rstrip()
            if _is_read_as(text or following, value):
                return f"{shown} on the command line"
        elif at and word != source and (place := _find_in_file(word, name, value)):
            return place
    [default] = [field.default for field in dataclasses.fields(args) if field.name == name] or [None]
    if value == default:
        return _name_default(args)
    place = describe_place((*told.line, 0))
    return place if default is not None else f"{place}, or chosen by {type(args).__name__}"


def _find_in_file(file: str, name: str, value: Any) -> str:
    """Where a file of arguments has an argument with this value; empty if it does not."""
    document = _read_arguments(file)
    if document is None or name not in document.value or not _is_read_as(str(document.value[name]), value):
        return ""
    return describe_place(document.locate((name,)))


@cache
def _read_arguments(file: str) -> Document | None:
    """A file of arguments that the command line names. Larger files, such as training data, are not read."""
    if file.endswith((".json", ".yaml", ".yml")) and os.path.isfile(file) and os.path.getsize(file) < _MOST_BYTES:
        with suppress(DocumentError, StorageError):
            return documents.parse(storage.read_text(file), file)
    return None


def _is_read_as(text: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value == (text.lower() not in ("no", "false", "f", "n", "0"))  # a flag without a value is true
    try:
        return bool(float(text) == value)
    except ValueError:
        return text == str(value)


def fill_in_batch(config: dict[str, Any]) -> None:
    """Makes transformers fill in a missing batch size or number of accumulation steps. DeepSpeed refuses a config
    without a batch size, and does not accumulate without that number."""
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        config["train_micro_batch_size_per_gpu"] = "auto"
    config.setdefault("gradient_accumulation_steps", "auto")


def fill_in_sizes(config: dict[str, Any], model: Any) -> None:
    """Makes transformers calculate sizes that are 0 from the model's hidden size: that was its word for "auto"."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and hasattr(getattr(model, "config", None), "hidden_size"):
        zero.update({key: "auto" for key in _CALCULATED if zero.get(key) == 0})


def install() -> None:
    """Replaces transformers' error. Called when transformers.integrations.deepspeed has been imported."""
    process: Callable[..., None] = HfTrainerDeepSpeedConfig.trainer_config_process
    finalize: Callable[..., None] = HfTrainerDeepSpeedConfig.trainer_config_finalize

    def fill_in_and_process(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        if tell_origin(self) is not None:
            fill_in_batch(self.config)
        process(self, args, *rest, **named)

    def finalize_and_explain(self: Any, args: Any, model: Any, num_training_steps: Any) -> None:
        told = tell_origin(self)
        if told is not None:
            fill_in_sizes(self.config, model)
        try:
            finalize(self, args, model, num_training_steps)
        except ValueError:
            if told is not None and self.mismatches and (problems := explain(self.mismatches, args, told)):
                unused = find_unused(self.config, args, num_training_steps, told)
                raise ConfigError([*problems, *unused]) from None
            raise
        if told is not None and (unused := find_unused(self.config, args, num_training_steps, told)):
            raise ConfigError(unused)

    HfTrainerDeepSpeedConfig.trainer_config_process = fill_in_and_process  # type: ignore[method-assign]
    HfTrainerDeepSpeedConfig.trainer_config_finalize = finalize_and_explain  # type: ignore[method-assign]
