"""DeepSpeed configs: how their keys are called in a job document, and how a config and a job are merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dsjob.contract import schema as contract
from dsjob.contract.paths import Path, get_at
from dsjob.contract.schema import Schema
from dsjob.contract.shown import shorten
from dsjob.errors import Problem

# DeepSpeed's top-level keys that a job document has elsewhere. All others keep name and place.
_MOVED: dict[str | int, tuple[str, str]] = {
    "train_batch_size": ("trainer", "train_batch"),
    "train_micro_batch_size_per_gpu": ("trainer", "micro_batch"),
    "gradient_accumulation_steps": ("trainer", "grad_accum"),
    "steps_per_print": ("trainer", "log_every"),
    "sequence_parallel_size": ("context_parallel", "size"),
    "tensorboard": ("monitor", "tensorboard"),
    "csv_monitor": ("monitor", "csv_monitor"),
    "wandb": ("monitor", "wandb"),
    "comet": ("monitor", "comet"),
}
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Sections that a job document has under the same name and with the same meaning.
_JOB_SECTIONS = (
    "gradient_clipping",
    "gradient_allreduce_op",
    "prescale_gradients",
    "gradient_predivide_factor",
    "communication_data_type",
    "bf16",
    "fp16",
    "torch_autocast",
    "zero_optimization",
    "optimizer",
    "scheduler",
    "amp",
    "activation_checkpointing",
    "pipeline",
    "tensor_parallel",
    "compile",
    "ops",
    "aio",
    "data_types",
)
# Sections that are passed to the installed DeepSpeed with `engine: deepspeed`. dsjob itself handles the others: it
# builds the optimizer and the schedule, for example.
ENGINE_SECTIONS = tuple(
    key
    for key in _JOB_SECTIONS
    if key
    not in (
        *("optimizer", "scheduler", "amp", "activation_checkpointing"),
        *("pipeline", "tensor_parallel", "compile", "ops"),
    )
)


# What a job has as a callback.
CALLBACKS = {"wall_clock_breakdown": "WallClock", "memory_breakdown": "MemoryUse", "flops_profiler": "Flops"}


def list_callbacks(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The callbacks that a (checked) DeepSpeed config asks for, by the name of its key."""
    flops = config.get("flops_profiler") or {}
    found: dict[str, dict[str, Any]] = {key: {} for key in CALLBACKS if config.get(key) is True}
    if flops.get("enabled") is True:
        # DeepSpeed counts steps from 0, and measures the time of steps too.
        found |= {"wall_clock_breakdown": {}, "flops_profiler": {"step": flops.get("profile_step", 1) + 1}}
        if flops.get("detailed", True) and not flops.get("output_file"):
            found["flops_profiler"] |= {"depth": flops.get("module_depth", -1)}
    return {key: {"_target_": f"dsjob.callbacks.{CALLBACKS[key]}", **found[key]} for key in CALLBACKS if key in found}


def to_job(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a job document that corresponds to a (checked) DeepSpeed config."""
    job: dict[str, Any] = {key: config[key] for key in _JOB_SECTIONS if key in config}
    for key, (section, name) in _MOVED.items():
        if key in config:
            job.setdefault(section, {})[name] = config[key]
    return job


def drop_moved(config: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config without the keys that a job document has under other names."""
    return {key: value for key, value in config.items() if key not in _MOVED}


def to_job_path(path: Path) -> Path:
    """The path in a job document that corresponds to `path` in a DeepSpeed config."""
    return (*_MOVED[path[0]], *path[1:]) if path and path[0] in _MOVED else path


def to_config_path(path: Path) -> Path:
    """The path in a DeepSpeed config that corresponds to `path` in a job document."""
    for key, moved in _MOVED.items():
        if path[:2] == moved:
            return (key, *path[2:])
    return path


def to_config_words(problem: Problem) -> Problem:
    """A problem, rewritten with DeepSpeed's names for batch sizes."""

    def rename(text: str) -> str:
        for key, (section, name) in _MOVED.items():
            bare = "?" if section == "trainer" else ""  # else any "size" would be a length of sequences
            text = re.sub(rf"\b(?:{section}\.){bare}{name}\b", str(key), text)
        return re.sub(r"(use )?launch\.nproc=(\d+)", lambda found: f"start {_count_ranks(found[2])}", text)

    return replace(problem, message=rename(problem.message), hint=rename(problem.hint))


def _count_ranks(number: str) -> str:
    return f"{number} rank" if number == "1" else f"{number} ranks"


def build_on(
    job: dict[str, Any], config: dict[str, Any], place: Callable[[Path], str], overridden: Callable[[Path], bool]
) -> tuple[dict[str, Any], list[Problem]]:
    """`job` merged over a DeepSpeed config, which supplies the values that the job does not set.

    It is a problem if the two give different values, unless the job's value comes from the command line or a recipe
    (`overridden`), or one of them is "auto". `place` returns the file and line of the value at a path.
    """
    problems: list[Problem] = []
    base = to_job(config)
    for path, theirs in _leaves(base, ()):
        ours = get_at(job, path)
        if ours is None or ours == theirs or "auto" in (ours, theirs) or overridden(path):
            continue
        where = ".".join(str(part) for part in to_config_path(path))
        there = place(("deepspeed", *to_config_path(path)))
        message = f"is {shorten(ours)} ({place(path)}), but deepspeed.{where} says {shorten(theirs)} ({there})"
        problems.append(Problem(message, path, "conflict", "keep one of the two"))
    return build_on_given(job, config), problems


def build_on_given(job: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """`job` merged over a config with all keys as they are spelt in the input, so that `check` can report them."""
    base = to_job(config)
    for section in ("optimizer", "scheduler"):
        if _replaces(job.get(section), base.get(section)):
            del base[section]
    return _merge(job, base, contract.job_schema())


def find_origin(path: Path, job: dict[str, Any], config: dict[str, Any]) -> Path:
    """The path in the document that the merged job's `path` comes from: `path` itself, or one under `deepspeed`."""
    theirs = to_config_path(path)
    if path and get_at(job, path) is None and get_at(config, theirs) is not None:
        return ("deepspeed", *theirs)
    return path


def _replaces(ours: Any, theirs: Any) -> bool:
    """Whether the job's optimizer or scheduler has arguments of its own for another type than the config's, so that
    the config's arguments do not apply."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return False
    same_type = str(ours.get("type", theirs.get("type"))).lower() == str(theirs.get("type")).lower()
    return "_target_" in ours or ("params" in ours and not same_type)


def _merge(job: dict[str, Any], base: dict[str, Any], schema: Schema | None) -> dict[str, Any]:
    def name(key: str) -> str:
        below = contract.child(schema, key) if schema is not None else None
        return str((below or {}).get("x-alias-of", key))

    ours = {name(key) for key in job}
    merged = {key: value for key, value in base.items() if key in job or name(key) not in ours}
    for key, value in job.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            below = contract.child(schema, key, value) if schema is not None else None
            merged[key] = _merge(value, base[key], below)
        elif not (value == "auto" and key in base):
            merged[key] = value
    return merged


def _leaves(value: dict[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, (*path, key))
        else:
            yield (*path, key), item
