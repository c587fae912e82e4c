"""A run that fails before it has got anywhere leaves no folder behind, unless its error points at something in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from dsjob.errors import DsjobError
from dsjob.run_folder import RESOLVED_NAME, RESULT_NAME, SAVE_REQUEST

_DOCUMENTS = {RESOLVED_NAME, RESULT_NAME, SAVE_REQUEST}  # what a start writes, which the same command writes again
_LOGS, _ATTEMPTS = "logs", os.path.join("checkpoints", "attempts")


def find_existing(pattern: str, name: str) -> str:
    """The part of a pattern of run folders that is there already, before one is made."""
    path = os.path.abspath(os.path.expanduser(pattern.replace("%name", name).partition("%time")[0]))
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


@contextmanager
def taking_back(run_dir: str, existing: str) -> Iterator[None]:
    """Removes a run's folder, and the empty ones above it up to `existing`, where the block fails and nothing is in it
    but what a start writes. A folder that held anything before stays as it is, and so does one under Slurm, whose
    record of it a requeued job follows.
    """
    begun = bool(os.listdir(run_dir)) or "SLURM_JOB_ID" in os.environ
    try:
        yield
    except BaseException as error:
        told = str(error) if isinstance(error, DsjobError) else ""
        if not begun and os.path.join(run_dir, _LOGS) not in told and _is_unused(run_dir):
            _remove(run_dir, existing)
        raise


def _is_unused(run_dir: str) -> bool:
    """Whether a folder has no log record, no checkpoint and nothing of the user's: only what each start writes."""
    attempts = 0
    for folder, _, files in os.walk(run_dir):
        place = os.path.relpath(folder, run_dir)
        if place == _ATTEMPTS:
            attempts += len(files)  # of a second run, if there are two
        elif files and place != _LOGS and not (place == "." and set(files) <= _DOCUMENTS):
            return False
    return attempts <= 1


def _remove(run_dir: str, existing: str) -> None:
    shutil.rmtree(run_dir, ignore_errors=True)
    folder = os.path.dirname(os.path.abspath(run_dir))
    while folder != existing and folder.startswith(existing):
        try:
            os.rmdir(folder)
        except OSError:  # not empty: of other runs
            return
        folder = os.path.dirname(folder)
