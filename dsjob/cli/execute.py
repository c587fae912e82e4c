"""Running a composed document, alone or in a sweep: resolve it, launch it, read what came of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from dsjob import launch, storage
from dsjob.document import Document
from dsjob.errors import Interrupted, Problem
from dsjob.origins import Composed
from dsjob.resolve import read_nproc, resolve_job

_RESULT_NAME = "result.json"


def import_folders(file: Document | None) -> list[str]:
    """Where modules that a document names may lie: the current folder, and the job file's own."""
    folders = [os.getcwd()]
    if file is not None and "://" not in file.source:
        folders.append(os.path.dirname(os.path.abspath(file.source)))
    return list(dict.fromkeys(folders))


def run_composed(composed: Composed, folders: list[str], debug: bool, *, run_dir: str | None = None) -> dict[str, Any]:
    """Resolves and runs a composed document; what its result.json says. `run_dir` is made where absent."""
    joined = launch.read_world_size()
    world_size = joined or read_nproc(composed.document)
    document, warnings = resolve_job(composed.document, world_size=world_size, locate=composed.locate)
    if not joined or os.environ.get("RANK") == "0":
        _print_warnings(warnings)
    if joined:
        return launch.join(document, import_from=folders)
    run_dir = run_dir or launch.make_run_dir(document["output"]["dir"], document["name"])
    before = _list_commits(run_dir)
    try:
        return launch.start(document, run_dir, import_from=folders, debug=debug)
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
