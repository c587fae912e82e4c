"""From a composed document to a resolved one: complete, checked, every number an own one, ready to be run.

Order: check, build on the DeepSpeed config, other spellings, whole floats to integers, defaults, "auto", batch triad.
A resolved document is itself a valid job, so resolving it again changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsjob import dsconfig
from dsjob import schema as contract
from dsjob.batch import BatchConfig
from dsjob.check import Path, check_job, check_shape
from dsjob.errors import ConfigError, DocumentError, Problem
from dsjob.schema import Schema
from dsjob.spec import EngineSpec, view

Place = tuple[str, int, int]  # source, line, column; line 0 where only the source is known
Locate = Callable[[Path], Place]


def read_nproc(document: dict[str, Any]) -> int:
    """`launch.nproc` of a document that need not be valid; 1 where it is not a positive number."""
    section = document.get("launch")
    nproc = section.get("nproc") if isinstance(section, dict) else None
    return int(nproc) if isinstance(nproc, (int, float)) and 1 <= nproc < math.inf else 1


def place_problems(problems: list[Problem], locate: Locate) -> list[Problem]:
    """`problems` with the places of their paths filled in."""
    placed = []
    for problem in problems:
        source, line, column = locate(problem.path)
        placed.append(replace(problem, source=source, line=line, column=column))
    return placed


def resolve_job(document: dict[str, Any], *, world_size: int, locate: Locate) -> tuple[dict[str, Any], list[Problem]]:
    """The resolved document for `world_size` data-parallel ranks, and the warnings.

    `document`: as composed, "not set" left out (`schema.prune`). Raises DocumentError with all problems at once.
    """
    schema = contract.job_schema()
    given = {key: value for key, value in document.items() if key not in ("deepspeed", "$schema")}
    body = document.get("deepspeed")
    config: dict[str, Any] = _rename(body, contract.deepspeed_schema()) if isinstance(body, dict) else {}
    job, conflicts = dsconfig.build_on(
        given,
        config,
        place=lambda path: _describe(locate(path)),
        overridden=lambda path: locate(path)[1] == 0,  # only what a file says has a line
    )
    problems = _drop_repeated(check_job({**document, **job})) + conflicts
    problems = place_problems(problems, lambda path: locate(dsconfig.find_origin(path, given, config)))
    _raise_errors(problems)
    resolved = _complete(job, schema)
    _reopen_batch(resolved, world_size, locate)
    _settle_batch(resolved, world_size, locate)
    resolved["resolved"] = {**resolved.get("resolved", {}), "world_size": world_size}
    return contract.sort_keys(resolved, schema), problems


def resolve_config(config: dict[str, Any], *, world_size: int, locate: Locate) -> tuple[EngineSpec, list[Problem]]:
    """What a bare DeepSpeed config asks of the engine. Raises ConfigError with all problems at once."""
    schema = contract.deepspeed_schema()
    config = contract.prune(config, schema)
    problems = place_problems(check_shape(config, schema) + _check_length(config), locate)
    _raise_errors(problems, ConfigError)
    job = contract.job_schema()
    resolved = _complete(dsconfig.to_job(config), job)
    try:
        _settle_batch(resolved, world_size, lambda path: locate(()))
    except DocumentError as error:
        raise ConfigError([dsconfig.to_config_words(problem) for problem in error.problems]) from None
    return view(EngineSpec, resolved), problems


def _check_length(config: dict[str, Any]) -> list[Problem]:
    """A job knows how many steps it takes; a program that calls `initialize` has to say so."""
    scheduler = config.get("scheduler")
    if not isinstance(scheduler, dict) or scheduler.get("type") not in ("WarmupDecayLR", "WarmupCosineLR"):
        return []
    params = scheduler.get("params", {})
    if not isinstance(params, dict) or params.get("total_num_steps", "auto") != "auto":
        return []
    place: Path = ("scheduler", "params", "total_num_steps") if "total_num_steps" in params else ("scheduler",)
    return [Problem("needs total_num_steps", place, "no-total-steps", "the optimizer steps that the program will take")]


def _raise_errors(problems: list[Problem], kind: type[DocumentError] = DocumentError) -> None:
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise kind(errors)


def _drop_repeated(problems: list[Problem]) -> list[Problem]:
    """`problems` without those of the built job that the check of its `deepspeed` section has found too."""
    found = {(problem.path[1:], problem.rule) for problem in problems if problem.path[:1] == ("deepspeed",)}
    return [problem for problem in problems if (dsconfig.to_config_path(problem.path), problem.rule) not in found]


def _describe(place: Place) -> str:
    source, line, column = place
    return f"{source}:{line}:{column}" if line else source


def _complete(document: dict[str, Any], schema: Schema) -> dict[str, Any]:
    renamed: dict[str, Any] = _own_numbers(_rename(document, schema), schema)
    return contract.fill_defaults(renamed, schema)


def _rename(value: Any, schema: Schema) -> Any:
    if not isinstance(value, dict):
        return value
    renamed = {}
    for key, item in value.items():
        below = contract.child(schema, key, value)
        name = below.get("x-alias-of", key) if below else key
        renamed[name] = _rename(item, below) if below else item
    return renamed


def _own_numbers(value: Any, schema: Schema) -> Any:
    """Whole floats (5e8) become integers where the schema asks for integers."""
    if schema.get("type") == "integer" and isinstance(value, float):
        return int(value)
    if isinstance(value, dict):
        return {key: _own_numbers(item, contract.child(schema, key, value) or {}) for key, item in value.items()}
    return value


def _reopen_batch(resolved: dict[str, Any], world_size: int, locate: Locate) -> None:
    """Forgets what was derived when the document was resolved before, where that no longer holds."""
    before, trainer = resolved.get("resolved", {}).get("world_size"), resolved["trainer"]
    triad = ("train_batch", "micro_batch", "grad_accum")
    if before is None or not all(name in trainer for name in triad):
        return
    given = [name for name in triad if locate(("trainer", name))[0].startswith("command line")]
    if not given and before != world_size:
        moved = BatchConfig.from_dict(trainer).move_to(world_size)
        trainer.update(micro_batch=moved.micro_batch, grad_accum=moved.grad_accum)
    elif len(given) == 1:
        kept = {"train_batch": "micro_batch"}.get(given[0], "train_batch")
        for name in set(triad) - {given[0], kept}:
            del trainer[name]
    elif len(given) == 2:
        (derived,) = set(triad) - set(given)
        del trainer[derived]


def _settle_batch(resolved: dict[str, Any], world_size: int, locate: Locate) -> None:
    trainer = resolved["trainer"]
    try:
        batch = BatchConfig.from_dict(trainer).resolve(world_size)
    except DocumentError as error:
        raise DocumentError(place_problems(list(error.problems), locate)) from None
    trainer.update(train_batch=batch.train_batch, micro_batch=batch.micro_batch, grad_accum=batch.grad_accum)
