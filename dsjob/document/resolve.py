"""Resolves a composed document: the result is checked, complete, and ready to run.

The steps are: normalise spellings, merge with the DeepSpeed config, check, resolve batch sizes, resolve "auto", fill in
defaults. A resolved document is itself a valid job. Resolving it again for the same number of ranks changes nothing.

`resolved` in resolved.json records the number of ranks that the batch sizes were derived for. On another number they
are derived again, with the same train_batch. The length of a schedule is derived at run time, so extending a run
extends its schedule.
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
from dsjob.contract.directions import falls
from dsjob.contract.model_ranks import count_model_ranks
from dsjob.contract.models import list_models, take_model
from dsjob.contract.paths import Path, get_at, has_at
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import JobSpec, view
from dsjob.document.auto import RATE_FROM_NOTHING, resolve_auto
from dsjob.document.bare import complete_config
from dsjob.document.normal import complete, normalise, use_integers
from dsjob.document.places import Locate, Place, describe_place, place_problems
from dsjob.document.sizes import Ranks, check_parts, leave_sizes_open, settle_sizes, tell_sizes
from dsjob.errors import DocumentError, Problem

_MINUTES = 15  # between saves


@dataclass(frozen=True)
class Resolved:
    """A resolved document, its warnings, and a text by path on how each derived value was obtained."""

    document: dict[str, Any]
    warnings: list[Problem]
    derived: dict[Path, str]


def resolve_job(document: dict[str, Any], *, world_size: int, locate: Locate, ranks_from: str = "") -> Resolved:
    """Resolves a document for `world_size` ranks, in groups that share one model (`contract.model_ranks`).

    `document`: composed, without unset keys (`schema.prune`). `ranks_from`: the source of `world_size`, for messages.
    Raises DocumentError with all problems at once.
    """
    own = {key: value for key, value in document.items() if key not in ("deepspeed", "$schema")}
    body = document.get("deepspeed")
    config: dict[str, Any] = body if isinstance(body, dict) else {}

    def locate_origin(path: Path) -> Place:
        return locate(deepspeed_keys.find_origin(path, own, config))

    job, problems = _build(document, own, config, locate)
    _add_callbacks(job, config)
    problems += check_parts(job, world_size, ranks_from)
    _take_micro_batches(job)
    sizes = None
    if not leave_sizes_open(problems):
        trainer, ranks = job.get("trainer", {}), Ranks.of_job(job, world_size, ranks_from)
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
    return Resolved(resolved, warnings + place_problems(_warn_of_rates(resolved, derived), locate_origin), derived)


def _take_micro_batches(job: dict[str, Any]) -> None:
    """Sets trainer.grad_accum to pipeline.micro_batches, if that is given alone."""
    micro, trainer = get_at(job, ("pipeline", "micro_batches")), job.get("trainer", {})
    if isinstance(micro, int) and isinstance(trainer, dict) and trainer.get("grad_accum", "auto") == "auto":
        job["trainer"] = {**trainer, "grad_accum": micro}


def _add_callbacks(job: dict[str, Any], config: dict[str, Any]) -> None:
    """Adds the callbacks that a DeepSpeed config asks for, except those that the job has."""
    callbacks = job.get("callbacks")
    given = callbacks if isinstance(callbacks, dict) else {}
    there = {each.get("_target_") for each in given.values() if isinstance(each, dict)}
    asked = deepspeed_keys.list_callbacks(config)
    added = {name: each for name, each in asked.items() if each["_target_"] not in there}
    if added:
        job["callbacks"] = {**given, **added}


def _warn_of_rates(resolved: dict[str, Any], derived: dict[Path, str]) -> list[Problem]:
    """A warning for each learning rate that is "auto": nothing in a job determines it."""
    paths = [path for path, how in derived.items() if how == RATE_FROM_NOTHING]
    message = '"auto" is derived from nothing in a job: lr is {:g}, the default of TrainingArguments'
    hint = "write a number, for example lr: 1e-3"
    return [Problem(message.format(get_at(resolved, path)), path, "auto", hint, severity="warning") for path in paths]


def _build(
    document: dict[str, Any], own: dict[str, Any], config: dict[str, Any], locate: Locate
) -> tuple[dict[str, Any], list[Problem]]:
    """The job's own keys (`own`) merged over its DeepSpeed config, normalised; and the problems of both."""
    schema = contract.job_schema()
    job, conflicts = deepspeed_keys.build_on(
        normalise(own, schema),
        normalise(config, contract.deepspeed_schema()),
        place=lambda path: describe_place(locate(path)),
        overridden=lambda path: locate(path)[1] == 0,  # only values from a file have a line
    )
    found = check_job({**document, **deepspeed_keys.build_on_given(own, config)})
    # The type of an optimizer may come from one of the two, and its arguments from the other. So the schema of the
    # arguments is known only now.
    return use_integers(job, schema), [*_drop_repeated(found, own), *conflicts]


def _settle(job: dict[str, Any], sizes: BatchSizes, world_size: int) -> tuple[dict[str, Any], dict[Path, str]]:
    """A checked job with a value for every key, and a text by path on how each derived value was obtained."""
    given = job.get("trainer", {})
    told = _resolve_models(job)
    job["checkpoint"] = _save_now_and_then(job.get("checkpoint", {}))
    told |= _choose_direction(job)
    resolved, derived = complete(job)
    resolved["trainer"].update(dataclasses.asdict(sizes))
    resolved["resolved"] = {**resolved.get("resolved", {}), "world_size": world_size}
    told = {**derived, **told, **tell_sizes(given, sizes, world_size // count_model_ranks(resolved))}
    return contract.sort_keys(resolved, contract.job_schema()), told


def _save_now_and_then(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint section, with saves every `_MINUTES` minutes if it does not say when to save."""
    told = checkpoint.keys() & {"every", "every_minutes", "every_epochs"} or checkpoint.get("at_end") is False
    return checkpoint if told else {**checkpoint, "every_minutes": _MINUTES}


def _choose_direction(job: dict[str, Any]) -> dict[Path, str]:
    """Sets checkpoint.best.mode if the name of the metric says which values are better. Returns a text on that by
    path."""
    best = job["checkpoint"].get("best")
    if not isinstance(best, dict) or "mode" in best or not falls(metric := best.get("metric", "eval/loss")):
        return {}
    job["checkpoint"] = {**job["checkpoint"], "best": {**best, "mode": "min"}}
    return {("checkpoint", "best", "mode"): f"of {metric}, lower values are better"}


def _resolve_models(job: dict[str, Any]) -> dict[Path, str]:
    """Resolves "auto" in place in each entry of `models`. Returns a text by path on how each value was derived."""
    derived: dict[Path, str] = {}
    for name, entry in job.get("models", {}).items():
        alone, how = resolve_auto(take_model(job, name))
        for path, text in how.items():
            if get_at(entry, path) == "auto":
                get_at(entry, path[:-1])[path[-1]] = get_at(alone, path)
                derived[("models", name, *path)] = text
    return derived


def complete_job(document: Mapping[str, Any]) -> ResolvedJob:
    """Converts a resolved document to the typed value that ranks receive.

    Keys that are missing because an earlier version of dsjob resolved the document get their defaults.
    """
    sections, configs = {}, {}
    for name in list_models(document):
        sections[name] = _complete_model(document, name)
        configs[name] = complete_config(sections[name], view(JobSpec, sections[name]))
    return ResolvedJob.of(_complete(dict(document)), sections, configs)


def view_model(document: Mapping[str, Any], name: str) -> JobSpec:
    """One of the models of a resolved document, as if the job had no other, without its DeepSpeed config."""
    return view(JobSpec, _complete_model(document, name))


def _complete_model(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _complete(take_model(document, name))


def _complete(job: dict[str, Any]) -> dict[str, Any]:
    return complete(normalise(job, contract.job_schema()))[0]


def _drop_repeated(problems: list[Problem], given: dict[str, Any]) -> list[Problem]:
    """`problems` without those of the merged job that the check of its `deepspeed` section reports as well.

    Keys that the job sets itself (`given`) keep their own report.
    """
    found = {(problem.path[1:], problem.rule) for problem in problems if problem.path[:1] == ("deepspeed",)}
    return [
        problem
        for problem in problems
        if (deepspeed_keys.to_config_path(problem.path), problem.rule) not in found or has_at(given, problem.path)
    ]
