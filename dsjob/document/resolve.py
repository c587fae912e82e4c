"""From a composed document to a resolved one: complete, checked, every number an own one, ready to be run.

Order: check, build on the DeepSpeed config, other spellings, whole floats to integers, defaults, "auto", batch triad.
A resolved document is itself a valid job, so resolving it again for as many ranks changes nothing.

`resolved` in resolved.json records for how many ranks the batch sizes were derived: on another number they are derived
again, and train_batch stays. The length of a schedule is left to the run, so that a longer run has a longer schedule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsjob.contract import deepspeed_keys, legacy
from dsjob.contract import schema as contract
from dsjob.contract.batch import BatchSizes
from dsjob.contract.check import check_config, check_job
from dsjob.contract.models import list_models, take_model
from dsjob.contract.paths import Path, get_at, has_at
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.schema import Schema
from dsjob.contract.spec import EngineSpec, JobSpec, view
from dsjob.document.auto import resolve_auto
from dsjob.errors import ConfigError, DocumentError, Problem

Place = tuple[str, int, int]  # source, line, column; line 0 where only the source is known
Locate = Callable[[Path], Place]
_MINUTES = 15  # between saves
_PARTS = ("trainer", "model_parallel_size")


def read_nproc(document: dict[str, Any]) -> int:
    """`launch.nproc` of a document that need not be valid; 1 where it is not a positive number."""
    section = document.get("launch")
    nproc = section.get("nproc") if isinstance(section, dict) else None
    return int(nproc) if isinstance(nproc, (int, float)) and 1 <= nproc < math.inf else 1


def choose_world_size(
    document: dict[str, Any], locate: Locate, *, asked: int | None = None, started: int | None = None
) -> tuple[int, str]:
    """For how many ranks to look at a document, and what says so.

    `asked`: by a flag; `started`: by torchrun or srun. A document that was resolved for more ranks than launch.nproc
    starts, as under torchrun, is looked at for those, unless launch.nproc is given on the command line.
    """
    if asked or started:
        return (asked, "--world-size") if asked else (started or 1, "ranks that were started")
    before = get_at(document, ("resolved", "world_size"))
    if isinstance(before, int) and before > 0 and not locate(("launch", "nproc"))[0].startswith("command line"):
        return before, "what it was resolved for"
    return read_nproc(document), "launch.nproc"


def place_problems(problems: list[Problem], locate: Locate) -> list[Problem]:
    """`problems` with the places of their paths filled in."""
    placed = []
    for problem in problems:
        source, line, column = locate(problem.path)
        placed.append(replace(problem, source=source, line=line, column=column))
    return placed


@dataclass(frozen=True)
class Resolved:
    """A resolved document, the warnings, and how values came about that nobody gave: by path, in words."""

    document: dict[str, Any]
    warnings: list[Problem]
    derived: dict[Path, str]


def resolve_job(document: dict[str, Any], *, world_size: int, locate: Locate, ranks_from: str = "") -> Resolved:
    """The resolved document for `world_size` ranks, of which trainer.model_parallel_size hold one model together.

    `document`: as composed, "not set" left out (`schema.prune`). `ranks_from`: what says how many ranks there are.
    Raises DocumentError with all problems at once.
    """
    schema = contract.job_schema()
    given = {key: value for key, value in document.items() if key not in ("deepspeed", "$schema")}
    body = document.get("deepspeed")
    config: dict[str, Any] = body if isinstance(body, dict) else {}
    job, conflicts = deepspeed_keys.build_on(
        _rename(legacy.map_amp(legacy.expand(given)), schema),
        _rename(legacy.map_amp(legacy.expand(config)), contract.deepspeed_schema()),
        place=lambda path: _describe(locate(path)),
        overridden=lambda path: locate(path)[1] == 0,  # only what a file says has a line
    )

    def locate_origin(path: Path) -> Place:
        return locate(deepspeed_keys.find_origin(path, given, config))

    problems = (
        _drop_repeated(check_job({**document, **deepspeed_keys.build_on_given(given, config)}), given) + conflicts
    )
    problems += _divides(job.get("trainer"), world_size, ranks_from)
    batch = None
    touched: list[Path] = []
    for key in deepspeed_keys.BATCH_KEYS:
        touched += [(key,), ("deepspeed", key), deepspeed_keys.to_job_path((key,))[1:]]
    touched.append(_PARTS)
    if not any(p.severity == "error" and (p.path in touched or _leaves_batch_open(p)) for p in problems):
        trainer = _own_numbers(job.get("trainer", {}), schema["properties"]["trainer"])
        parts = trainer.get("model_parallel_size", 1)
        data_ranks = world_size // parts
        asked = _reopen_batch(trainer, document.get("resolved"), data_ranks, parts, locate)
        try:
            batch = asked.resolve(
                data_ranks,
                name=lambda key: _tell_origin(getattr(asked, key), trainer.get(key), locate_origin(("trainer", key))),
                ranks=ranks_from if parts == 1 else f"{world_size} ranks / model_parallel_size {parts}",
                parts=parts,
            )
        except DocumentError as error:
            named = [key for key in dataclasses.asdict(asked) if key in job.get("trainer", {})]
            problems += [replace(found, path=("trainer", *named[:1])) for found in error.problems]
    problems = place_problems(problems, locate_origin)
    _raise_errors(problems)
    assert batch is not None
    job, derived = resolve_auto(job)
    derived |= _resolve_models(job)
    job["checkpoint"] = _save_now_and_then(job.get("checkpoint", {}))
    resolved = contract.fill_defaults(_own_numbers(job, schema), schema)
    _tell_batch(derived, job.get("trainer", {}), batch, world_size // resolved["trainer"]["model_parallel_size"])
    resolved["trainer"].update(dataclasses.asdict(batch))
    resolved["resolved"] = {**resolved.get("resolved", {}), "world_size": world_size}
    return Resolved(contract.sort_keys(resolved, schema), problems, derived)


def _save_now_and_then(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The section with minutes between saves where it says nothing of when to save."""
    told = checkpoint.keys() & {"every", "every_minutes", "every_epochs"} or checkpoint.get("at_end") is False
    return checkpoint if told else {**checkpoint, "every_minutes": _MINUTES}


def resolve_config(config: dict[str, Any], *, world_size: int, locate: Locate) -> tuple[EngineSpec, list[Problem]]:
    """What a bare DeepSpeed config asks of the engine. Raises ConfigError with all problems at once."""
    config = contract.prune(config, contract.deepspeed_schema())
    problems, batch = _check_config(config, world_size, locate)
    problems = place_problems(problems, locate)
    _raise_errors(problems, ConfigError)
    assert batch is not None
    schema = contract.job_schema()
    job, derived = resolve_auto(_read_config(config))
    resolved = contract.fill_defaults(_own_numbers(job, schema), schema)
    resolved["trainer"].update(dataclasses.asdict(batch))
    for path, how in derived.items():
        message = f'"auto" has become {get_at(resolved, path)}: {how.removeprefix("auto: ")}'
        problems.append(
            Problem(message, deepspeed_keys.to_config_path(path), "auto", "give a value", severity="warning")
        )
    return view(EngineSpec, resolved), place_problems(problems, locate)


def complete_config(given: Mapping[str, Any], spec: EngineSpec | None = None) -> dict[str, Any]:
    """A checked DeepSpeed config, or a resolved job's sections of that name, with all defaults and `spec`'s batch."""
    schema = contract.deepspeed_schema()
    config = contract.prune({key: value for key, value in given.items() if key in schema["properties"]}, schema)
    config = _own_numbers(resolve_auto(_rename(legacy.map_amp(legacy.expand(config)), schema))[0], schema)
    sizes = (spec.trainer.train_batch, spec.trainer.micro_batch, spec.trainer.grad_accum) if spec is not None else ()
    known: dict[str, Any] = {key: value for key, value in config.items() if value != "auto"}
    for key, section in schema["properties"].items():
        if section.get("type") == "object" and not section.get("deprecated") and key not in ("optimizer", "scheduler"):
            known.setdefault(key, {})
    return {
        **contract.fill_defaults(known, schema, idle=True),
        **dict(zip(deepspeed_keys.BATCH_KEYS, sizes, strict=False)),
    }


def _resolve_models(job: dict[str, Any]) -> dict[Path, str]:
    """Puts the values that "auto" stands for in place, in each of several models; how they came about, by path."""
    derived: dict[Path, str] = {}
    for name, entry in job.get("models", {}).items():
        alone, how = resolve_auto(take_model(job, name))
        for path, text in how.items():
            if get_at(entry, path) == "auto":
                get_at(entry, path[:-1])[path[-1]] = get_at(alone, path)
                derived[("models", name, *path)] = text
    return derived


def complete_job(document: Mapping[str, Any]) -> ResolvedJob:
    """A resolved document as the typed value that ranks are given.

    What an earlier version of dsjob has resolved lacks the keys of later versions: they get their defaults.
    """
    sections, configs = {}, {}
    for name in list_models(document):
        sections[name] = _complete(take_model(document, name))
        configs[name] = complete_config(sections[name], view(JobSpec, sections[name]))
    return ResolvedJob.of(_complete(dict(document)), sections, configs)


def _complete(job: dict[str, Any]) -> dict[str, Any]:
    schema = contract.job_schema()
    job = _rename(legacy.map_amp(legacy.expand(job)), schema)
    return contract.fill_defaults(_own_numbers(resolve_auto(job)[0], schema), schema)


def check_bare_config(config: dict[str, Any], *, world_size: int | None, locate: Locate) -> list[Problem]:
    """Everything wrong with a DeepSpeed config that is looked at by itself.

    What it leaves open is for the job or program to say that will use it, and a warning: "auto", and where
    `world_size` is None the number of ranks.
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
                message=f"holds for {ranks} ranks alone",
                path=(deepspeed_keys.BATCH_KEYS[0],),
                hint=f"dsjob validate --world-size {ranks} checks it for them",
                severity="warning",
            )
        if problem.rule == "batch" and left:
            problem = _leave_open((left[0],))
        elif problem.rule == "no-total-steps" and len(problem.path) > 1:
            problem = _leave_open(problem.path)
        problems.append(problem)
    return place_problems(problems, locate)


def _find_ranks(config: dict[str, Any]) -> int | None:
    """The only number of ranks, above 1, for which all three batch sizes of a config hold."""
    sizes = [config.get(key) for key in deepspeed_keys.BATCH_KEYS]
    if not all(isinstance(size, (int, float)) and size > 0 for size in sizes):
        return None
    train, micro, accum = (int(size) for size in sizes if isinstance(size, (int, float)))
    return train // (micro * accum) if train % (micro * accum) == 0 and train > micro * accum else None


def _leave_open(path: Path) -> Problem:
    message = '"auto" is left to what uses this config'
    return Problem(message, path, "auto", "a job says it: dsjob cfg.yaml deepspeed=FILE", severity="warning")


def _read_config(config: dict[str, Any]) -> dict[str, Any]:
    return deepspeed_keys.to_job(_rename(legacy.map_amp(legacy.expand(config)), contract.deepspeed_schema()))


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


def _leaves_batch_open(problem: Problem) -> bool:
    """Whether a problem of a job's trainer section is of its batch sizes: one of them is wrong, or mistyped."""
    if problem.path[:1] != ("trainer",):
        return problem.path == ()
    names = ("train_batch", "micro_batch", "grad_accum")
    meant = problem.hint if problem.hint.startswith("did you mean") else ""
    return len(problem.path) == 1 or problem.path[1] in names or any(name in meant for name in names)


def _is_of_batch(problem: Problem) -> bool:
    """Whether a problem of a DeepSpeed config leaves its batch sizes open: one of them is wrong, or mistyped."""
    meant = problem.hint if problem.hint.startswith("did you mean") else ""
    return (
        not problem.path
        or problem.path[0] in deepspeed_keys.BATCH_KEYS
        or any(key in meant for key in deepspeed_keys.BATCH_KEYS)
    )


def _tell_origin(asked: int | None, given: Any, place: Place) -> str:
    """Where a batch size comes from, in brackets; nothing where it is not asked for, but follows from others."""
    if asked is None:
        return ""
    return f" ({_describe(place)})" if asked == given else " (derived)"  # from what was resolved for other ranks


def _tell_batch(derived: dict[Path, str], given: dict[str, Any], batch: BatchSizes, world_size: int) -> None:
    formulas = {
        "train_batch": f"micro_batch {batch.micro_batch} x grad_accum {batch.grad_accum} x {world_size} ranks",
        "micro_batch": f"train_batch {batch.train_batch} / grad_accum {batch.grad_accum} / {world_size} ranks",
        "grad_accum": f"train_batch {batch.train_batch} / micro_batch {batch.micro_batch} / {world_size} ranks",
    }
    both = all(given.get(key, "auto") != "auto" for key in ("train_batch", "micro_batch"))
    for key, formula in formulas.items():
        if given.get(key, "auto") == "auto" or given[key] != getattr(batch, key):
            derived["trainer", key] = f"derived: {formula}" if both or key != "grad_accum" else "default"


def _raise_errors(problems: list[Problem], kind: type[DocumentError] = DocumentError) -> None:
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise kind(errors, [problem for problem in problems if problem.severity != "error"])


def _drop_repeated(problems: list[Problem], given: dict[str, Any]) -> list[Problem]:
    """`problems` without those of the built job that the check of its `deepspeed` section has found too.

    What the job has in its own right (`given`) is told in its own right.
    """
    found = {(problem.path[1:], problem.rule) for problem in problems if problem.path[:1] == ("deepspeed",)}
    return [
        problem
        for problem in problems
        if (deepspeed_keys.to_config_path(problem.path), problem.rule) not in found or has_at(given, problem.path)
    ]


def _describe(place: Place) -> str:
    source, line, column = place
    return f"{source}:{line}:{column}" if line else source


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


def _divides(trainer: Any, world_size: int, ranks_from: str) -> list[Problem]:
    """That the ranks are groups of model_parallel_size."""
    parts = trainer.get("model_parallel_size", 1) if isinstance(trainer, dict) else 1
    if not isinstance(parts, (int, float)) or parts < 1 or world_size % parts == 0:
        return []
    told = f" ({ranks_from})" if ranks_from else ""
    message = f"{world_size} rank{'s' * (world_size > 1)}{told} do not divide into groups of {parts:g}"
    hint = f"start {int(parts) * max(1, world_size // int(parts))} ranks, or another multiple of {int(parts)}"
    return [Problem(message, _PARTS, "model-parallel-size", hint)]


def _reopen_batch(trainer: dict[str, Any], before: Any, world_size: int, parts: int, locate: Locate) -> BatchSizes:
    """The batch sizes that are asked for: without what was derived when the document was resolved before."""
    asked = BatchSizes.of_trainer(trainer)
    triad = ("train_batch", "micro_batch", "grad_accum")
    if not isinstance(before, dict) or "world_size" not in before or None in dataclasses.astuple(asked):
        return asked
    given = [name for name in triad if locate(("trainer", name))[0].startswith("command line")]
    if not given:
        return asked if before["world_size"] == world_size * parts else asked.move_to(world_size)
    kept = [*given, {"train_batch": "micro_batch"}.get(given[0], "train_batch")] if len(given) == 1 else given
    return replace(asked, **{name: None for name in triad if name not in kept})
