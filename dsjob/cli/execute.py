"""Running a composed document, alone or in a sweep: resolve it, launch it, read what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from dsjob import launch
from dsjob.cli.trusted import list_untrusted
from dsjob.errors import DocumentError, Interrupted, Problem
from dsjob.origins import Composed
from dsjob.resolve import read_nproc, resolve_job
from dsjob.run_folder import describe_other_job, list_commits, make_run_dir
from dsjob.trust import Trust


def run_composed(composed: Composed, trust: Trust, debug: bool, *, run_dir: str | None = None) -> dict[str, Any]:
    """Resolves and runs a composed document; what its result.json says. `run_dir` is made where absent.

    Raises DocumentError for what the document names and `trust` does not grant, before anything of it is imported.
    """
    joined = launch.read_world_size()
    world_size = joined or read_nproc(composed.document)
    resolved = resolve_job(
        composed.document,
        world_size=world_size,
        locate=composed.locate,
        ranks_from="ranks that were started" if joined else "launch.nproc",
    )
    document, warnings = resolved.document, resolved.warnings
    if composed.file is not None and "://" not in composed.file.source:
        document["resolved"].setdefault("file", os.path.abspath(composed.file.source))
    problems = list_untrusted(composed, document, trust)
    if problems:
        raise DocumentError(problems)
    if not joined or os.environ.get("RANK") == "0":
        _print_warnings(warnings)
    if joined:
        return launch.join(document, trust=trust)
    run_dir = run_dir or make_run_dir(document["output"]["dir"], document["name"])
    before = list_commits(run_dir, document)
    if before and (other := describe_other_job(run_dir, document)):
        raise DocumentError([Problem(other, ("output", "dir"), "another-job", "choose another output.dir")])
    try:
        return launch.start(document, run_dir, trust=trust, debug=debug)
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, (Interrupted, KeyboardInterrupt)) and before
        if stopped or list_commits(run_dir, document) != before:
            print(f"dsjob: to go on from the last checkpoint: dsjob run {run_dir}", file=sys.stderr)  # noqa: T201
        raise


def _print_warnings(warnings: Sequence[Problem]) -> None:
    idle = [problem.dotted for problem in warnings if problem.rule == "no-effect"]
    if idle:
        print(f"no effect here: {', '.join(idle)} (`dsjob validate` says why)", file=sys.stderr)  # noqa: T201
    for problem in warnings:
        if problem.rule != "no-effect":
            print(problem, file=sys.stderr)  # noqa: T201
