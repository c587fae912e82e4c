"""Hints on what a misspelt or misplaced key probably means: similar names, and names of DeepSpeed and HF Trainer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from dsjob.contract import deepspeed_keys
from dsjob.contract import schema as contract
from dsjob.contract.paths import Path

_USUAL: dict[str, Path] = {  # names that many training loops use
    "epochs": ("trainer", "max_epochs"),
    "num_epochs": ("trainer", "max_epochs"),
    "steps": ("trainer", "max_steps"),
    "batch_size": ("trainer", "micro_batch"),
}
_WARM_UP = ("warmup", "warm_up", "warmup_step")  # similar to several arguments of DeepSpeed's schedules
# Numbers as JSON writes them; `suggest_literal` suggests them without quotes.
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_YES_AND_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def explain_key(path: Path, key: str, known: Sequence[str] = (), *, bare: bool) -> str:
    """A hint for an unknown key that another tool has; empty if none has it.

    `known`: the keys that exist at `path`. `bare`: whether the key is in a DeepSpeed config instead of a job.

    HF's `TrainingArguments` are only considered where people write them by mistake: at the top level, and in the
    sections with related settings.
    """
    from dsjob.contract.trainer_arguments import ARGUMENTS  # a long module that is only needed for mistakes

    if key == "_target_":
        return "write model: {_target_: ...}" if path[:1] == ("models",) else "this section does not call anything"
    if key.startswith(("_", "//", "#")):
        return "for a note, write a comment (// in JSON, # in YAML), or a key that starts with _comment"
    if not path and not bare and key in contract.deepspeed_schema()["properties"]:
        replaced = contract.deepspeed_schema()["properties"][key].get("x-replaced-by")
        if replaced in contract.job_schema()["properties"]:
            return f'did you mean "{replaced}"?'
        moved = deepspeed_keys.to_job_path((key,))
        if moved != (key,):
            return f"this is DeepSpeed's name for {_dotted(moved)}"
        return "it belongs under deepspeed"
    if not bare and path in ((), ("trainer",)) and key in _USUAL:
        return f'did you mean "{_dotted(_USUAL[key][len(path) :])}"?'
    if key in _WARM_UP and "warmup_num_steps" in known:
        return 'did you mean "warmup_num_steps"?'
    in_config = bare or path[:1] == ("deepspeed",)
    argument = ARGUMENTS.get(key)
    if argument is None or path[:1] not in ((), ("trainer",), ("optimizer",), ("scheduler",), ("deepspeed",)):
        return ""
    if not argument.keys:
        return f"this is an argument of HF Trainer; {argument.about}" if argument.about else ""
    homes: list[Path] = [tuple(home.split(".")) for home in argument.keys]
    theirs = next((home for home in homes if home[:-1] == path and home[-1] in known), homes[0])
    if in_config and deepspeed_keys.to_config_path(theirs)[0] not in contract.deepspeed_schema()["properties"]:
        return f"this is HF Trainer's name for {_dotted(theirs)} of a job document"
    if in_config:
        theirs = (*path[: path[:1] == ("deepspeed",)], *deepspeed_keys.to_config_path(theirs))
    if theirs[:-1] == path:
        return f'did you mean "{theirs[-1]}"?'
    return f"this is HF Trainer's name for {_dotted(theirs)}"


def explain_login(path: Path, key: str) -> str:
    """A hint for a login in the section of Weights & Biases, which has no key for it; empty for any other key."""
    is_login = path[-1:] == ("wandb",) and key in ("api_key", "key", "token", "login")
    return "leave it out: wandb reads its key from the environment variable WANDB_API_KEY" if is_login else ""


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def suggest(word: str, known: Sequence[str], least: float = 0.6) -> str:
    """`did you mean "x"?` for the known word most similar to `word`; empty if none is similar. least: see
    `find_similar`."""
    meant = find_similar(word, known, least)
    return f'did you mean "{meant}"?' if meant else ""


def find_similar(word: str, known: Sequence[str], least: float = 0.6) -> str:
    """The known word most similar to `word`; empty if none is similar. least: how similar, from 0 to 1 (equal)."""
    spelled = {name.lower(): name for name in reversed(known)}
    near = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=least)
    return spelled[near[0]] if near else ""


def suggest_literal(value: Any, names: Sequence[str]) -> str:
    """How to write a number or boolean that was given as a string, or a boolean given as 0 or 1."""
    if not isinstance(value, str):
        return f"write {str(bool(value)).lower()}" if "boolean" in names and value in (0, 1) else ""
    if {"integer", "number"} & set(names):
        if _NUMBER.fullmatch(value):
            return f"write {value} without the quotes"
        try:
            return f"write {float(value):g}{'' if '_' in value else ' without the quotes'}"
        except ValueError:
            return ""
    if "boolean" in names and value.lower() in ("true", "false"):
        return f"write {value.lower()} without the quotes"
    if "boolean" in names and value.lower() in _YES_AND_NO:
        return f"write {_YES_AND_NO[value.lower()]}"
    return ""
