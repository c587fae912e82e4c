"""From a composed document to a resolved one: complete, checked, every number an own one, ready to be run.

Order: one spelling, build on the DeepSpeed config, check, batch sizes, "auto", defaults. A resolved document is itself
a valid job, so resolving it again for as many ranks changes nothing.

`resolved` in resolved.json records for how many ranks the batch sizes were derived: on another number they are derived
again, and train_batch stays. The length of a schedule is left to the run, so that a longer run has a longer schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsjob.contract import deepspeed_keys
from dsjob.contract import schema as contract
from dsjob.contract.batch import BatchSizes
from dsjob.contract.check import check_job
from dsjob.contract.models import list_models, take_model
from dsjob.contract.paths import Path, get_at, has_at
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import JobSpec, view
from dsjob.document.auto import resolve_auto
from dsjob.document.bare import complete_config
from dsjob.document.normal import complete, normalise, use_integers
from dsjob.document.places import Locate, Place, describe_place, place_problems
from dsjob.document.sizes import Ranks, check_parts, leave_sizes_open, settle_sizes, tell_sizes
from dsjob.errors import DocumentError, Problem

_MINUTES = 15  # between saves


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
    own = {key: value for key, value in document.items() if key not in ("deepspeed", "$schema")}
    body = document.get("deepspeed")
    config: dict[str, Any] = body if isinstance(body, dict) else {}

    def locate_origin(path: Path) -> Place:
        return locate(deepspeed_keys.find_origin(path, own, config))

    job, problems = _build(document, own, config, locate)
    problems += check_parts(job.get("trainer"), world_size, ranks_from)
    sizes = None
    if not leave_sizes_open(problems):
        trainer = job.get("trainer", {})
        ranks = Ranks(world_size, ranks_from, trainer.get("model_parallel_size", 1))
        try:
            sizes = settle_sizes(trainer, ranks, document.get("resolved"), locate=locate, locate_origin=locate_origin)
        except DocumentError as error:
            problems += error.problems
    problems = place_problems(problems, locate_origin)
    errors = [problem for problem in problems if problem.severity == "error"]
    warnings = [problem for problem in problems if problem.severity != "error"]
    if errors:
        raise DocumentError(errors, warnings)
    assert sizes is not None
    resolved, derived = _settle(job, sizes, world_size)
    return Resolved(resolved, warnings, derived)


def _build(
    document: dict[str, Any], own: dict[str, Any], config: dict[str, Any], locate: Locate
) -> tuple[dict[str, Any], list[Problem]]:
    """What a job says itself (`own`) built on its DeepSpeed config, normalised; and all that is wrong with both."""
    schema = contract.job_schema()
    job, conflicts = deepspeed_keys.build_on(
        normalise(own, schema),
        normalise(config, contract.deepspeed_schema()),
        place=lambda path: describe_place(locate(path)),
        overridden=lambda path: locate(path)[1] == 0,  # only what a file says has a line
    )
    found = check_job({**document, **deepspeed_keys.build_on_given(own, config)})
    # One of the two may name the type of an optimizer, and the other its arguments.
    return use_integers(job, schema), [*_drop_repeated(found, own), *conflicts]


def _settle(job: dict[str, Any], sizes: BatchSizes, world_size: int) -> tuple[dict[str, Any], dict[Path, str]]:
    """A checked job with a value for every key, and how values came about that nobody gave."""
    given = job.get("trainer", {})
    told = _resolve_models(job)
    job["checkpoint"] = _save_now_and_then(job.get("checkpoint", {}))
    resolved, derived = complete(job)
    resolved["trainer"].update(dataclasses.asdict(sizes))
    resolved["resolved"] = {**resolved.get("resolved", {}), "world_size": world_size}
    told = {**derived, **told, **tell_sizes(given, sizes, world_size // resolved["trainer"]["model_parallel_size"])}
    return contract.sort_keys(resolved, contract.job_schema()), told


def _save_now_and_then(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The section with minutes between saves where it says nothing of when to save."""
    told = checkpoint.keys() & {"every", "every_minutes", "every_epochs"} or checkpoint.get("at_end") is False
    return checkpoint if told else {**checkpoint, "every_minutes": _MINUTES}


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
    return complete(normalise(job, contract.job_schema()))[0]


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
