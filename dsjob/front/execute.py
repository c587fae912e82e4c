"""Runs a composed document, alone or in a sweep: resolve, launch, read the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from dsjob.contract.environment import hide_values, parse_reference
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.secrets import list_texts
from dsjob.document.origins import PROGRAM, Composed
from dsjob.document.places import place_problems
from dsjob.document.resolve import Resolved, complete_job
from dsjob.document.sizes import read_nproc
from dsjob.errors import DocumentError, Problem, UsageError
from dsjob.front.check import check_composed, find_other_job
from dsjob.front.origins import describe_given
from dsjob.front.places import placing_errors
from dsjob.front.process import keeping_process
from dsjob.launch import launcher
from dsjob.launch.surroundings import quiet_torch
from dsjob.run_folder import make_run_dir, marking_running
from dsjob.terminal import print_error, print_lines
from dsjob.training.advice import count_too_few_cores
from dsjob.training.failed_starts import find_existing, taking_back
from dsjob.training.form import read_form
from dsjob.trust.grant import Trust
from dsjob.trust.named import name_places
from dsjob.trust.presence import find_absent
from dsjob.trust.user import find_program, place_origins

Smoke = Literal["", "first", "only"]  # whether a smoke run precedes the run, or replaces it


def run_composed(
    composed: Composed, trust: Trust, debug: bool, *, run_dir: str | None = None, smoke: Smoke = ""
) -> dict[str, Any]:
    """Resolves and runs a composed document. Returns the contents of result.json; nothing after `smoke` only. Creates
    `run_dir` if it is None.

    Raises DocumentError if the document names something that `trust` does not grant, before importing anything.
    """
    joined = launcher.read_world_size()
    world_size = joined or read_nproc(composed.document)
    trust = name_places(trust, composed)
    resolved, told = check_runnable(composed, trust)
    document, given = resolved.document, describe_given(composed, resolved)
    if origin := _find_origin(composed):
        document["resolved"].setdefault("file", origin)
    if launcher.is_first():
        for note in composed.notes:
            print_error(note)
        _print_warnings([*told, *place_problems(_warn_of_cores(document), composed.locate)])
        if run_dir is None and not read_form():
            _say_first(composed, world_size)
    if smoke:
        _try_first(composed, document, trust, debug)
    if smoke == "only":
        return {}
    if joined:
        quiet_torch()
        from dsjob.launch.joined import join

        with placing_errors(composed):
            check_folder = partial(_refuse_other_job, composed, document, trust)
            return join(
                replace(complete_job(document), given=given), trust=trust, check_folder=check_folder, run_dir=run_dir
            )
    job = replace(complete_job(document), given=given)
    if run_dir is not None:
        with launcher.telling_what_is_kept(run_dir, document), marking_running(run_dir):
            return _start(composed, job, run_dir, trust, debug)
    wanted = document["output"]["dir"], document["name"]
    existing, run_dir = find_existing(*wanted), make_run_dir(*wanted)
    telling = launcher.telling_what_is_kept(run_dir, document)
    with telling, taking_back(run_dir, existing), marking_running(run_dir):
        return _start(composed, job, run_dir, trust, debug)


def _try_first(composed: Composed, document: dict[str, Any], trust: Trust, debug: bool) -> None:
    """Runs the smoke run of a resolved document as the run itself will be: on the ranks that were started, in this
    process, or on new ranks. DeepSpeed's engine needs new ones: it can be built once in a process."""
    from dsjob.front.smoke import try_job

    driven, joined = document["engine"] == "deepspeed", launcher.read_world_size() is not None
    if driven and joined:
        raise UsageError(
            "a smoke run builds the engine twice, and DeepSpeed's can be built only once in the ranks that torchrun or "
            "srun has started",
            hint="first run dsjob run --smoke-only without torchrun or srun, then the job without --smoke",
        )

    def start(job: ResolvedJob, folder: str) -> dict[str, Any]:
        with placing_errors(composed):
            if not joined:
                return launcher.start(job, folder, trust=trust, debug=debug, apart=driven)
            from dsjob.launch.joined import join

            return join(job, trust=trust, check_folder=lambda _: None, run_dir=folder)

    here = not joined and document["launch"]["nproc"] == 1
    with keeping_process(torch=True) if here and not driven else nullcontext():
        try_job(document, start)


def check_runnable(composed: Composed, trust: Trust) -> tuple[Resolved, list[Problem]]:
    """The resolved job, and the warnings about it. Raises DocumentError for what a run refuses before it
    starts."""
    joined = launcher.read_world_size()
    world_size = joined or read_nproc(composed.document)
    ranks_from = "ranks that were started" if joined else "launch.nproc"
    checked = check_composed(composed, trust, world_size=world_size, ranks_from=ranks_from)
    known = checked.resolved.document if checked.resolved else composed.document
    hide_values(known)
    return checked.require(_find_unset(composed, known)), checked.problems


def _find_origin(composed: Composed) -> str | None:
    """The local file that the job comes from; for a dict, the Python program that passed it."""
    source = composed.file.source if composed.file is not None else None
    if source == PROGRAM:
        return find_program()
    return os.path.abspath(source) if source is not None and "://" not in source else None


def _start(composed: Composed, job: ResolvedJob, run_dir: str, trust: Trust, debug: bool) -> dict[str, Any]:
    _refuse_other_job(composed, job.document, trust, run_dir)
    with placing_errors(composed):
        return launcher.start(job, run_dir, trust=trust, debug=debug)


def _refuse_other_job(composed: Composed, document: Mapping[str, Any], trust: Trust, run_dir: str) -> None:
    """Raises DocumentError if `run_dir` holds the run of another job: one with other targets, which may be misspelt."""
    problems = find_other_job(composed, document, run_dir) if "train" in document["tasks"] else []
    if problems:
        absent = [replace(one, severity="error") for one in find_absent(document, trust)]
        raise DocumentError([*place_origins(absent, composed), *problems])


def _say_first(composed: Composed, world_size: int) -> None:
    """Prints a first line before torch is imported, which takes seconds."""
    given = "a dict" if composed.file and composed.file.source == PROGRAM else ""
    origin = given or composed.file.source if composed.file else f"recipe {', '.join(composed.recipes)}"
    ranks = f"{world_size:,} rank{'s' * (world_size > 1)}"
    print_lines(f"starting {composed.document['name']} ({origin}) on {ranks}")


def _warn_of_cores(document: dict[str, Any]) -> list[Problem]:
    cores = count_too_few_cores(document["launch"])
    message = f"far more ranks than the {cores} CPU core{'s' * (cores > 1)} of this machine: they will be slow"
    hint = f"set launch.nproc={cores}, or use a machine with one GPU per rank"
    return [Problem(message, ("launch", "nproc"), "cores", hint, severity="warning")] if cores else []


def _find_unset(composed: Composed, document: dict[str, Any]) -> list[Problem]:
    """Problems for environment variables that targets refer to and that are not set."""
    found = []
    for path, text in list_texts(document):
        reference = parse_reference(text)
        if reference and (missing := reference.find_missing()):
            message = f"environment variable {missing} is not set"
            found.append(Problem(message, path, "environment", f"export {missing}=..."))
    return place_problems(found, composed.locate)


def _print_warnings(warnings: Sequence[Problem]) -> None:
    idle = [problem.dotted for problem in warnings if problem.rule == "no-effect"]
    if idle:
        print_lines(f"no effect here: {', '.join(idle)} (`dsjob validate` says why)", file=sys.stderr)
    for problem in warnings:
        if problem.rule != "no-effect":
            print_lines(str(problem), file=sys.stderr)
