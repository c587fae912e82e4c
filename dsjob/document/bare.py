"""Bare DeepSpeed configs: resolved for `initialize`, and checked by `validate` without a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsjob.contract import deepspeed_keys
from dsjob.contract import schema as contract
from dsjob.contract.batch import BatchSizes
from dsjob.contract.check import check_config
from dsjob.contract.paths import Path, get_at
from dsjob.contract.spec import EngineSpec, view
from dsjob.contract.wording import show
from dsjob.document.auto import resolve_auto
from dsjob.document.normal import complete, normalise, settle_torch_adam
from dsjob.document.places import Locate, place_problems
from dsjob.errors import ConfigError, DocumentError, Problem

_UNKNOWN = ("unknown-key", "unknown key")  # rule and message


def resolve_config(config: dict[str, Any], *, world_size: int, locate: Locate) -> tuple[EngineSpec, list[Problem]]:
    """The engine's settings from a bare DeepSpeed config, and warnings. Raises ConfigError with all problems."""
    config = contract.prune(config, contract.deepspeed_schema())
    problems, batch = _check_config(config, world_size, locate)
    problems = place_problems(problems, locate)
    if errors := [problem for problem in problems if problem.severity == "error"]:
        raise ConfigError(errors, [problem for problem in problems if problem.severity != "error"])
    assert batch is not None
    resolved, derived = complete(_read_config(config))
    resolved["trainer"].update(dataclasses.asdict(batch))
    idle = {problem.path for problem in problems if problem.rule == "no-effect"}
    for path, how in derived.items():
        place, value, reason = deepspeed_keys.to_config_path(path), get_at(resolved, path), how.removeprefix("auto: ")
        message = f'"auto" means {reason}' if value is None else f'"auto" means {show(value)} ({reason})'
        if place not in idle:
            hint = "to choose another value, write it"
            problems.append(Problem(message, place, "auto", hint, severity="warning"))
    return view(EngineSpec, resolved), place_problems(problems, locate)


def leave_unknown_out(config: dict[str, Any], *, locate: Locate) -> tuple[dict[str, Any], list[Problem]]:
    """A bare DeepSpeed config without the keys that are unknown, and a warning about each."""
    dropped: list[Problem] = []
    # In rounds, since only the first unknown keys of an object are told one by one.
    while found := [each for each in check_config(config) if (each.rule, each.message) == _UNKNOWN]:
        config = _drop(config, {problem.path for problem in found})
        dropped += [replace(problem, message="unknown key, left out", severity="warning") for problem in found]
    return config, place_problems(dropped, locate)


def _drop(value: Any, paths: set[Path]) -> Any:
    """`value` without what lies at `paths`, which may lead through lists."""
    if isinstance(value, list):
        return [_drop(item, {path[1:] for path in paths if path[0] == index}) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    below = {key: {path[1:] for path in paths if path[0] == key} for key in value}
    return {key: _drop(item, below[key] - {()}) for key, item in value.items() if () not in below[key]}


def complete_config(given: Mapping[str, Any], spec: EngineSpec | None = None) -> dict[str, Any]:
    """A checked DeepSpeed config with all defaults, and with the batch sizes of `spec`.

    `given` may also be a resolved job: its sections with DeepSpeed's names are used.
    """
    schema = contract.deepspeed_schema()
    config = contract.prune({key: value for key, value in given.items() if key in schema["properties"]}, schema)
    config = resolve_auto(settle_torch_adam(normalise(config, schema)))[0]
    sizes = (spec.trainer.train_batch, spec.trainer.micro_batch, spec.trainer.grad_accum) if spec is not None else ()
    known: dict[str, Any] = {key: value for key, value in config.items() if value != "auto"}
    for key, section in schema["properties"].items():
        if section.get("type") == "object" and not section.get("deprecated") and key not in ("optimizer", "scheduler"):
            known.setdefault(key, {})
    return {
        **contract.fill_defaults(known, schema, idle=True),
        **dict(zip(deepspeed_keys.BATCH_KEYS, sizes, strict=False)),
    }


def check_bare_config(config: dict[str, Any], *, world_size: int | None, locate: Locate) -> list[Problem]:
    """All problems of a bare DeepSpeed config.

    Values that the job or program will supply are warnings: "auto", and the number of ranks if `world_size` is None.
    """
    config = contract.prune(config, contract.deepspeed_schema())
    problems = []
    ranks_from = "--world-size" if world_size else "the default"
    for problem in _check_config(config, world_size or 1, locate, ranks_from)[0]:
        left = [key for key in deepspeed_keys.BATCH_KEYS if config.get(key) == "auto"]
        ranks = _find_ranks(config) if world_size is None and problem.rule == "batch" else None
        if ranks is not None:
            problem = replace(
                problem,
                message=f"valid only with {ranks} ranks",
                path=(deepspeed_keys.BATCH_KEYS[0],),
                hint=f"to check for {ranks} ranks: dsjob validate --world-size {ranks}",
                severity="warning",
            )
        if problem.rule == "batch" and left:
            problem = _leave_open((left[0],))
        elif problem.rule == "no-total-steps" and len(problem.path) > 1:
            problem = _leave_open(problem.path)
        problems.append(problem)
    return place_problems(problems, locate)


def _find_ranks(config: dict[str, Any]) -> int | None:
    """The number of ranks above 1 for which all three batch sizes of a config are consistent; None if there is none."""
    sizes = [config.get(key) for key in deepspeed_keys.BATCH_KEYS]
    if not all(isinstance(size, (int, float)) and size > 0 for size in sizes):
        return None
    train, micro, accum = (int(size) for size in sizes if isinstance(size, (int, float)))
    return train // (micro * accum) if train % (micro * accum) == 0 and train > micro * accum else None


def _leave_open(path: Path) -> Problem:
    message = '"auto" stays open until a job or program uses this config'
    return Problem(message, path, "auto", "use it in a job: dsjob cfg.yaml deepspeed=FILE", severity="warning")


def _read_config(config: dict[str, Any]) -> dict[str, Any]:
    return deepspeed_keys.to_job(normalise(config, contract.deepspeed_schema()))


def _check_config(
    config: dict[str, Any], world_size: int, locate: Locate, ranks_from: str = ""
) -> tuple[list[Problem], BatchSizes | None]:
    def tell(key: str) -> str:
        path = deepspeed_keys.to_config_path(("trainer", key))
        line = locate(path)[1] if get_at(config, path, "auto") != "auto" else 0
        return f" (line {line})" if line else ""

    problems = check_config(config)
    if any(p.severity == "error" and _is_of_batch(p) for p in problems):
        return problems, None
    try:
        asked = BatchSizes.of_trainer(_read_config(config).get("trainer", {}))
        return problems, asked.resolve(world_size, name=tell, ranks=ranks_from)
    except DocumentError as error:
        given = [key for key in deepspeed_keys.BATCH_KEYS if key in config]
        return problems + [deepspeed_keys.to_config_words(replace(f, path=(*given[:1],))) for f in error.problems], None


def _is_of_batch(problem: Problem) -> bool:
    """Whether a problem keeps the batch sizes from being resolved: one of them is invalid or misspelled."""
    meant = problem.hint if problem.hint.startswith("did you mean") else ""
    return (
        not problem.path
        or problem.path[0] in deepspeed_keys.BATCH_KEYS
        or any(key in meant for key in deepspeed_keys.BATCH_KEYS)
    )
