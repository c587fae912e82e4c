"""What a mistyped or misplaced key was probably meant to be: near names, and names of DeepSpeed and HF Trainer."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from dsjob.contract import deepspeed_keys
from dsjob.contract import schema as contract
from dsjob.contract.paths import Path

_USUAL: dict[str, Path] = {  # what many loops call it
    "epochs": ("trainer", "max_epochs"),
    "num_epochs": ("trainer", "max_epochs"),
    "steps": ("trainer", "max_steps"),
    "batch_size": ("trainer", "micro_batch"),
}


def explain_key(path: Path, key: str, known: Sequence[str] = (), *, bare: bool) -> str:
    """A hint for an unknown key that another tool has; empty where none has.

    `known`: the keys that there are at `path`. `bare`: in a DeepSpeed config by itself.

    HF's `TrainingArguments` are looked up where they are written by mistake: at the top, and in the sections that are
    about the same things.
    """
    from dsjob.contract.trainer_arguments import ARGUMENTS  # long, and needed for mistakes alone

    if key == "_target_":
        return "write model: {_target_: ...}" if path[:1] == ("models",) else "nothing is called here"
    if key.startswith(("_", "//", "#")):
        return "a note can be a comment (// in JSON, # in YAML), or a key that starts with _comment"
    if not path and not bare and key in contract.deepspeed_schema()["properties"]:
        replaced = contract.deepspeed_schema()["properties"][key].get("x-replaced-by")
        if replaced in contract.job_schema()["properties"]:
            return f'did you mean "{replaced}"?'
        moved = deepspeed_keys.to_job_path((key,))
        if moved != (key,):
            return f"DeepSpeed's name for {_dotted(moved)}"
        return "it belongs under deepspeed"
    if not bare and path in ((), ("trainer",)) and key in _USUAL:
        return f'did you mean "{_dotted(_USUAL[key][len(path) :])}"?'
    in_config = bare or path[:1] == ("deepspeed",)
    argument = ARGUMENTS.get(key)
    if argument is None or path[:1] not in ((), ("trainer",), ("optimizer",), ("scheduler",), ("deepspeed",)):
        return ""
    if not argument.keys:
        return f"it is HF Trainer's; {argument.about}" if argument.about else ""
    homes: list[Path] = [tuple(home.split(".")) for home in argument.keys]
    theirs = next((home for home in homes if home[:-1] == path and home[-1] in known), homes[0])
    if in_config and deepspeed_keys.to_config_path(theirs)[0] not in contract.deepspeed_schema()["properties"]:
        return f"HF Trainer's name for what a job calls {_dotted(theirs)}"
    if in_config:
        theirs = (*path[: path[:1] == ("deepspeed",)], *deepspeed_keys.to_config_path(theirs))
    if theirs[:-1] == path:
        return f'did you mean "{theirs[-1]}"?'
    return f"HF Trainer's name for {_dotted(theirs)}"


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def suggest(word: str, known: Sequence[str]) -> str:
    """`did you mean "x"?` for the known word nearest to `word`, or nothing."""
    spelled = {name.lower(): name for name in reversed(known)}
    near = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=0.6)
    return f'did you mean "{spelled[near[0]]}"?' if near else ""
