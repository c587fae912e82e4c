"""DeepSpeed configs: moves each value to the corresponding key of the job document, in its current spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsjob.contract import deepspeed_keys
from dsjob.contract import schema as contract
from dsjob.contract.paths import Path
from dsjob.importing.given import Draft, Given, Rank, leaves, nest

_ZERO = "zero_optimization"
# Sizes that the Trainer derives from the model's hidden size if they are "auto". In 2021, this was written as 0.
_FROM_HIDDEN_SIZE = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
_PIN = "cpu_offload_use_pin_memory"
# Keys that DeepSpeed rejects or ignores, and the keys to use instead.
MOVED: dict[Path, Path] = {
    ("optimizer", "params", "max_grad_norm"): ("gradient_clipping",),
    ("fp16", "clip"): ("gradient_clipping",),
}


def draft_deepspeed(config: dict[str, Any], locate: Callable[[Path], str], draft: Draft) -> None:
    """Adds a config's values to the draft. `locate` returns the file and line of the value at a path."""
    _note_empty(config, (), contract.deepspeed_schema(), locate, draft)
    for path, value in leaves(contract.prune(config, contract.deepspeed_schema())):
        given = Given(value, ".".join(map(str, path)), locate(path), Rank.DEEPSPEED)
        for target, carried in _modernise(path, given, config, draft):
            draft.put(_place(target, carried.value), carried)


def _note_empty(
    section: dict[str, Any], path: Path, schema: contract.Schema, locate: Callable[[Path], str], draft: Draft
) -> None:
    """Adds notes on empty sections that dsjob does not support. They hold no values, so nothing else reports them."""
    for key, value in section.items():
        here, below = (*path, key), contract.child(schema, key, section)
        if not isinstance(value, dict) or below is None:
            continue
        if value:
            _note_empty(value, here, below, locate, draft)
        elif below.get("x-status") == "unsupported":
            given = Given(value, ".".join(map(str, here)), locate(here), Rank.DEEPSPEED)
            draft.note(
                "not supported", f"{given.name} is not supported by dsjob, so left out; {below['x-note']}", given
            )


def _modernise(path: Path, given: Given, config: dict[str, Any], draft: Draft) -> list[tuple[Path, Given]]:
    """The current path of a value: mostly the same one; none, or two, for some old switches."""
    if path[0] == "bfloat16":
        path = ("bf16", *path[1:])
        draft.note("changed", "the section bfloat16 is now called bf16", given)
    if path == (_ZERO,) and isinstance(given.value, bool):
        draft.note("changed", f"{given.name} as a boolean means stage {int(given.value)}", given)
        return [((_ZERO, "stage"), given.to(int(given.value)))]
    if path in MOVED:
        draft.note("changed", f"{given.name} is now {'.'.join(map(str, MOVED[path]))}", given)
        return [(MOVED[path], given)]
    if path[0] == _ZERO and len(path) == 2:
        return _modernise_zero(str(path[1]), given, config[_ZERO], draft)
    return [(path, given)]


def _modernise_zero(key: str, given: Given, section: dict[str, Any], draft: Draft) -> list[tuple[Path, Given]]:
    if key in _OFFLOAD:
        if not draft.switch(given):
            return []
        draft.note("changed", f"{key} is now {_OFFLOAD[key]}.device=cpu", given)
        return [((_ZERO, _OFFLOAD[key], "device"), given.to("cpu"))]
    if key == _PIN:
        homes = {home for old, home in _OFFLOAD.items() if section.get(old) is True}
        if homes:
            draft.note("changed", f"{key} is now pin_memory of each offload section", given)
        else:
            draft.note("left out", f"{given.label}: this config offloads nothing", given)
        return [((_ZERO, home, "pin_memory"), given) for home in sorted(homes)]
    below = contract.child(contract.deepspeed_schema()["properties"][_ZERO], key) or {}
    name = below.get("x-alias-of", key)
    if name != key:
        draft.note("changed", f"{key} is now {name}", given)
    if name in _FROM_HIDDEN_SIZE and given.value == 0:
        draft.note("changed", f"{name}=0 meant a value derived from the model's hidden size; this is now auto", given)
        given = given.to("auto")
    return [((_ZERO, name), given)]


def _place(path: Path, value: Any) -> Path:
    """The path in a job document for `path` in a config. Keys that a job does not have go to its `deepspeed`
    section."""
    job = deepspeed_keys.to_job(nest(path, value))
    if job:
        return next(leaves(job))[0]
    ours = (
        path[0] in contract.job_schema()["properties"] and path[0] != "checkpoint"
    )  # dsjob's section of this name has other keys
    return path if ours else ("deepspeed", *path)
