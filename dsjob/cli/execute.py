"""Running a composed document, alone or in a sweep: resolve it, launch it, read what came of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from dsjob import launch, storage
from dsjob.cli.trusted import list_untrusted
from dsjob.errors import DocumentError, Interrupted, Problem
from dsjob.origins import Composed
from dsjob.resolve import read_nproc, resolve_job
from dsjob.trust import Trust

_RESULT_NAME = "result.json"


def run_composed(composed: Composed, trust: Trust, debug: bool, *, run_dir: str | None = None) -> dict[str, Any]:
    """Resolves and runs a composed document; what its result.json says. `run_dir` is made where absent.

    Raises DocumentError for what the document names and `trust` does not grant, before anything of it is imported.
    """
    joined = launch.read_world_size()
    world_size = joined or read_nproc(composed.document)
    document, warnings = resolve_job(composed.document, world_size=world_size, locate=composed.locate)
    problems = list_untrusted(composed, document, trust)
    if problems:
        raise DocumentError(problems)
    if not joined or os.environ.get("RANK") == "0":
        _print_warnings(warnings)
    if joined:
        return launch.join(document, trust=trust)
    run_dir = run_dir or launch.make_run_dir(document["output"]["dir"], document["name"])
    before = _list_commits(run_dir)
    try:
        return launch.start(document, run_dir, trust=trust, debug=debug)
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, (Interrupted, KeyboardInterrupt)) and before
        if stopped or _list_commits(run_dir) != before:
            print(f"dsjob: to go on from the last checkpoint: dsjob run {run_dir}", file=sys.stderr)  # noqa: T201
        raise


def _list_commits(run_dir: str) -> list[str]:
    return storage.list_names(os.path.join(run_dir, "checkpoints", "commits"))


def _print_warnings(warnings: Sequence[Problem]) -> None:
    if warnings:
        names = ", ".join(problem.dotted for problem in warnings)
        print(f"no effect here: {names} (`dsjob validate` says why)", file=sys.stderr)  # noqa: T201


def read_result(run_dir: str) -> dict[str, Any]:
    """A run's result.json; empty where there is none."""
    path = os.path.join(run_dir, _RESULT_NAME)
    if not os.path.exists(path):
        return {}
    content: dict[str, Any] = json.loads(storage.read_text(path))
    return content
