"""Removes the folder of a run that fails before its first step, unless the error refers to a file in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from dsjob.errors import DsjobError
from dsjob.run_folder import (
    LOGS_NAME,
    RESOLVED_NAME,
    RESULT_NAME,
    RUNNING_NAME,
    SAVE_REQUEST,
    STARTS_NAME,
    TRACEBACK_PREFIX,
)

# Files of a start, which the same command would write again.
_DOCUMENTS = {RESOLVED_NAME, RESULT_NAME, RUNNING_NAME, SAVE_REQUEST, STARTS_NAME}
_ATTEMPTS = os.path.join("checkpoints", "attempts")


def find_existing(pattern: str, name: str) -> str:
    """The part of a pattern for run folders that exists before the folder is created."""
    path = os.path.abspath(os.path.expanduser(pattern.replace("%name", name).partition("%time")[0]))
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


@contextmanager
def taking_back(run_dir: str, existing: str) -> Iterator[None]:
    """Removes a run's folder if the block fails and the folder contains only files of a start. Also removes empty
    parent folders up to `existing`.

    Keeps a folder that contained anything before. Under Slurm, keeps every folder: a requeued job resumes in it.
    """
    begun = bool(os.listdir(run_dir)) or "SLURM_JOB_ID" in os.environ
    try:
        yield
    except BaseException as error:
        message = str(error) if isinstance(error, DsjobError) else ""
        if not begun and os.path.join(run_dir, LOGS_NAME) not in message and _is_unused(run_dir):
            _remove(run_dir, existing)
        raise


def _is_unused(run_dir: str) -> bool:
    """Whether a folder contains only files of a start: no log records, no checkpoints, and no files of the user."""
    attempts = 0
    for folder, _, files in os.walk(run_dir):
        place = os.path.relpath(folder, run_dir)
        if place == _ATTEMPTS:
            attempts += len(files)  # more than one: a second run uses the folder
        elif place == LOGS_NAME:
            if any(name.startswith(TRACEBACK_PREFIX) for name in files):  # kept only once steps were taken
                return False
        elif files and not (place == "." and set(files) <= _DOCUMENTS):
            return False
    return attempts <= 1


def _remove(run_dir: str, existing: str) -> None:
    shutil.rmtree(run_dir, ignore_errors=True)
    folder = os.path.dirname(os.path.abspath(run_dir))
    while folder != existing and folder.startswith(existing):
        try:
            os.rmdir(folder)
        except OSError:  # not empty; it contains other runs
            return
        folder = os.path.dirname(folder)
