"""Importing from texts, and whether what comes out is a job that `dsjob validate` takes."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from job_documents import nowhere

from dsjob.contract.paths import get_at
from dsjob.document.resolve import resolve_job
from dsjob.document.sizes import read_nproc
from dsjob.errors import DocumentError
from dsjob.importing.command_line import Word, read_command
from dsjob.importing.gather import import_sources
from dsjob.importing.given import UNKNOWN, is_open
from dsjob.importing.settle import Imported
from dsjob.importing.sources import SourceKind, read_source


def import_texts(
    folder: Path,
    files: Mapping[str, Any],
    command: str = "",
    *,
    given: list[str] | None = None,
    kind: SourceKind | None = None,
) -> Imported:
    """Writes the files (objects as JSON) and imports them, or those `given`, with a command after `--`."""
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    sources = [read_source(str(folder / name), kind) for name in (files if given is None else given)]
    words = read_command([Word(word, "command line") for word in shlex.split(command)]) if command else None
    return import_sources(sources, words)


def import_command(command: str) -> Imported:
    """Imports a command alone."""
    words = read_command([Word(word, "command line") for word in shlex.split(command)])
    assert words is not None
    return import_sources([], words)


def get(document: dict[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def messages(imported: Imported, kind: str) -> str:
    """The notes of one kind, a line each."""
    return "\n".join(str(note) for note in imported.notes if note.kind == kind)


def fill_in(document: dict[str, Any]) -> dict[str, Any]:
    """The document with what its notes ask for."""
    filled = copy.deepcopy(document)
    trainer = filled.setdefault("trainer", {})
    if "max_steps" not in trainer and ("max_epochs" not in trainer or "scheduler" in filled):
        trainer["max_steps"] = 500
    if not {"micro_batch", "train_batch"} & set(trainer):
        trainer["micro_batch"] = 4
    filled.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 0.001}})
    for section in ("optimizer", "scheduler"):
        if section in filled and not {"type", "_target_"} & set(filled[section]):
            filled[section] = {"type": "SGD" if section == "optimizer" else "constant"}
    scheduler = filled.get("scheduler", {})
    for arguments in (scheduler, scheduler.get("params", {})):
        arguments.update({key: 50 for key, value in arguments.items() if value == UNKNOWN})
    return filled


def list_unmentioned(imported: Imported) -> list[str]:
    """What `dsjob validate` finds wrong with the document once it is filled in, and no note says."""
    document = fill_in(imported.document)
    told = [note.message for note in imported.notes if note.kind in ("mend", "not supported", "fill in")]
    try:
        resolve_job(document, world_size=read_nproc(document), locate=nowhere)
    except DocumentError as error:
        return [
            str(problem)
            for problem in error.problems
            if problem.severity == "error"
            and not is_open(get_at(document, problem.path))
            and not any(message.startswith((f"{problem.dotted}:", f"{problem.dotted} ")) for message in told)
        ]
    return []


def resolve_imported(imported: Imported, *, world_size: int | None = None) -> dict[str, Any]:
    """The resolved document. Only what a note calls not supported may stand in the way; it is taken out."""
    document = fill_in(imported.document)
    noted = messages(imported, "not supported")
    while True:
        try:
            return resolve_job(document, world_size=world_size or read_nproc(document), locate=nowhere).document
        except DocumentError as error:
            for problem in error.problems:
                if problem.severity == "error":
                    assert problem.rule == "unsupported", problem
                    assert problem.dotted in noted, problem
                    home: Any = document
                    for key in problem.path[:-1]:
                        home = home[key]
                    del home[problem.path[-1]]
