"""The run folder of a program: what was run, in which environment, and how it ended.

`program.json` has the command line, with *** in place of secrets; `environment.jsonl` has what it runs with
(`dsjob.provenance`); `result.json` says how it ended. The ranks add `deepspeed.json` and `metrics.jsonl`
(`dsjob.programs.recording`), and `logs/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from dsjob import provenance, storage
from dsjob.contract.secrets import is_secret, redact
from dsjob.errors import DsjobError, Preempted, StorageError, UsageError
from dsjob.run_folder import PROGRAM_NAME, make_run_dir, write_result
from dsjob.terminal import print_error

_PATTERN = "outputs/%name/%time"  # the default of `output.dir`


def create(program: str, run_dir: str | None) -> str:
    """Creates the run folder: `run_dir`, or `outputs/NAME/TIME` for the program NAME. Returns its path."""
    name = os.path.basename(os.path.abspath(program)).removesuffix(".py") or "program"  # `.` is a program, too
    try:
        return make_run_dir(run_dir or _PATTERN, name)
    except DsjobError as error:
        raise UsageError(error.message, hint="choose another folder with --run-dir") from error


def describe(run_dir: str, words: Sequence[str], engine: str, ranks: int) -> None:
    """Writes program.json and environment.jsonl. words: the program and its arguments."""
    about = {"command": hide_words(words), "folder": os.getcwd(), "engine": engine, "ranks": ranks}
    storage.write_bytes(os.path.join(run_dir, PROGRAM_NAME), json.dumps(about, indent=2).encode() + b"\n")
    provenance.append(run_dir, provenance.describe())


def conclude(run_dir: str, code: int, message: str, seconds: float) -> None:
    """Writes result.json: the exit code, why if it is not 0, and the seconds since the program began.

    Only prints why it cannot be written: the program has ended, and its exit code is what counts.
    """
    stopped = code in (Preempted.exit_code, 130, 143)
    status = "stopped" if stopped else "failed" if code else "done"
    told = {"error": message} if code else {}
    try:
        write_result(run_dir, {"status": status, "exit_code": code, "seconds": round(seconds, 1), **told})
    except StorageError as error:
        print_error(f"dsjob exec: {error.message}")


def hide_words(words: Sequence[str]) -> list[str]:
    """A command line with *** in place of the values of flags that are named like secrets, and of those in URLs."""
    shown, hidden = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = word.startswith("-") and is_secret(name.lstrip("-"))
        shown.append("***" if hidden else f"{name}=***" if secret and equals else redact(word))
        hidden = secret and not equals
    return shown
