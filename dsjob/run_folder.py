"""A run's folder: its name, its creation, and the documents in it.

`output.dir` is a pattern. Without `%time` in it, the next run resumes in the same folder. resolved.json is only
replaced once the new run has made progress, so a mistake in an override does no harm. metrics.jsonl has each step once:
records of steps that a run repeats are moved to metrics-superseded.jsonl, like commit records to `superseded/`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from dsjob import storage
from dsjob.contract.access import RESOLVED_NAME as RESOLVED_NAME
from dsjob.contract.masking import mask_texts
from dsjob.contract.paths import Path, get_at
from dsjob.errors import DsjobError, FencedError, StorageError
from dsjob.files import (
    append_bytes,
    lock,
    open_append,
    open_read,
    open_update,
    read_lines_backwards,
    sync_names,
    unlock,
)

PROGRAM_NAME = "program.json"  # instead of resolved.json, in the folder of a program under `dsjob exec`
GIVEN_NAME = "job.jsonl"  # the job as it was given, for each start
RESULT_NAME = "result.json"
METRICS_NAME = "metrics.jsonl"
LOGS_NAME = "logs"  # the folder for the output of ranks
TRACEBACK_PREFIX = "traceback-"
SUPERSEDED_METRICS_NAME = "metrics-superseded.jsonl"
MONITORS_NAME = "monitors.json"  # what the monitors of a run have received
RUNNING_NAME = "running"  # locked while a run is under way
STARTS_NAME = ".starts"  # how many runs have begun to train in the folder
SAVE_REQUEST = "save-now"  # users create this file to request a checkpoint
STOP_REQUEST = "stop-now"  # users create this file to end a run as after its last step
_TRIES, _PAUSE = 100, 0.02  # to get a lock; seconds between them


def make_run_dir(pattern: str, name: str) -> str:
    """Creates the run's folder and returns its path: `pattern` with `%name` and `%time` filled in. With `%time` the
    folder is always new.

    A job that Slurm has requeued gets its earlier folder.
    """
    record = _find_slurm_record(pattern, name)
    if record and os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and os.path.exists(record):
        return str(read_json(record)["run_dir"])
    chosen = _make_run_dir(pattern, name)
    if record:
        storage.write_bytes(record, json.dumps({"run_dir": os.path.abspath(chosen)}).encode())
    return chosen


def _find_slurm_record(pattern: str, name: str) -> str | None:
    """The file that records the run's folder for this step of a Slurm job. None if there is no Slurm job, or if the
    pattern has no `%time`, so that a requeued job finds the folder by its name."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal() or "%time" not in pattern:
        return None
    above = os.path.expanduser(pattern.partition("%time")[0].replace("%name", name))
    step = os.environ.get("SLURM_STEP_ID", "batch")
    return os.path.join(os.path.dirname(above) or ".", f".slurm-{job}-{step}-{name}.json")


def _make_run_dir(pattern: str, name: str) -> str:
    stamped = os.path.expanduser(pattern.replace("%name", name).replace("%time", time.strftime("%Y-%m-%d_%H-%M-%S")))
    chosen, number = stamped, 1
    while True:
        try:
            # Two runs may start within the same second: the second one gets a number.
            os.makedirs(chosen, exist_ok="%time" not in pattern)
            return chosen
        except FileExistsError:
            if not os.path.isdir(chosen):
                raise DsjobError(f"cannot create the folder {chosen}: a file has that name") from None
            chosen, number = f"{stamped}-{number}", number + 1
        except OSError as error:
            raise DsjobError(
                f"cannot create the folder {chosen}: {error.strerror}", hint="choose another output.dir"
            ) from error


@contextmanager
def marking_running(run_dir: str) -> Iterator[None]:
    """While the block runs, locks the file `running` in a run's folder. A kill releases the lock and leaves the file.

    Does nothing where files cannot be locked, and if another process has the lock.
    """
    path, process = os.path.join(run_dir, RUNNING_NAME), os.getpid()
    file = lock(path)
    try:
        yield
    finally:
        if file is not None and os.getpid() == process:  # else a fork leaves the block, and the run goes on
            with suppress(OSError):
                os.unlink(path)
            unlock(file)


def is_running(run_dir: str) -> bool:
    """Whether a run is under way in a folder, on this machine or on one that shares its locks."""
    try:
        with open_read(os.path.join(run_dir, RUNNING_NAME)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except (OSError, StorageError):
        return False


class Claim:
    """The claim of a run that begins to train in a folder: until a newer one begins there, it may write the files of
    the run. The checkpoints have claims of their own (`dsjob.checkpoint.root.attempts`)."""

    def __init__(self, run_dir: str) -> None:
        """Claims the folder. Raises StorageError."""
        self._run_dir = run_dir
        with self._locked() as file:
            self._number = _read_number(file) + 1
            file.seek(0)
            file.write(b"%d\n" % self._number)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """No newer run begins while the block writes. Raises FencedError if one has begun."""
        with self._locked() as file:
            if _read_number(file) > self._number:
                raise FencedError(
                    f"a newer run has begun in {self._run_dir}; this one no longer writes there",
                    hint="stop this run and keep the newer one; to run two jobs at once, give each its own output.dir",
                )
            yield

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        path = os.path.join(self._run_dir, STARTS_NAME)
        open_append(path).close()
        with open_update(path) as file:
            for _ in range(_TRIES):  # and no more: a run that is suspended keeps its lock
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_PAUSE)
                except OSError:  # files cannot be locked there
                    break
            yield file


def _read_number(file: BinaryIO) -> int:
    text = file.read(20).strip()
    return int(text) if text.isdigit() else 0


def write_resolved(run_dir: str, document: Mapping[str, Any]) -> None:
    """Writes resolved.json, and deletes an earlier run's result.json.

    Raises StorageError if result.json is a folder, or not that of a run, which is not deleted.
    """
    result = os.path.join(run_dir, RESULT_NAME)
    if storage.is_local(result) and os.path.isdir(storage.local_path(result)):
        raise StorageError(f"cannot write {result}: it is a folder", hint="choose another output.dir")
    if os.path.exists(result) and "status" not in read_json(result):
        raise StorageError(f"cannot write {result}: no run has written this file", hint="choose another output.dir")
    storage.write_bytes(os.path.join(run_dir, RESOLVED_NAME), json.dumps(document, indent=2).encode() + b"\n")
    storage.delete(result, recursive=False)


def append_given(run_dir: str, given: Mapping[str, Any]) -> None:
    """Adds the job as it was given at this start to job.jsonl. Nothing for a job that no file or command has given.

    Raises StorageError.
    """
    if not given:
        return
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **given}
    if record["file"] is not None and os.path.basename(record["file"]) == RESOLVED_NAME:
        record["document"] = None  # not what a user wrote: the run that it comes from has that
    append_bytes(os.path.join(run_dir, GIVEN_NAME), json.dumps(mask_texts(record)).encode() + b"\n")


def read_given(run_dir: str) -> Iterator[dict[str, Any]]:
    """The records of job.jsonl, one for each start of a run. Raises StorageError if it is not a regular file."""
    path = os.path.join(run_dir, GIVEN_NAME)
    if os.path.lexists(path):
        with open_read(path) as file:
            lines = [line for _, line in read_lines_backwards(file)]
        yield from filter(None, map(read_record, reversed(lines)))


def read_record(line: bytes) -> dict[str, Any]:
    """The JSON object in a line; empty if it is something else, such as a line that a kill has truncated."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def read_resolved(run_dir: str) -> dict[str, Any]:
    """The resolved document of the last run in a folder; empty if there is none."""
    return read_json(os.path.join(run_dir, RESOLVED_NAME))


def describe_other_job(run_dir: str, document: Mapping[str, Any]) -> str:
    """Describes the run in a folder if it has another model or dataset, so that this job must not resume it; otherwise
    empty."""
    there = read_resolved(run_dir)
    paths: list[Path] = [("data", "train"), *(("models", name, "model") for name in there.get("models", {}))]
    for path in [*paths, ("model",)] if "model" in there else paths:
        theirs = get_at(there, (*path, "_target_"))
        if theirs and theirs != get_at(document, (*path, "_target_")):
            return f"{run_dir} holds the run of another job: its {'.'.join(map(str, path[:2]))} is {theirs}"
    return ""


def write_result(run_dir: str, result: Mapping[str, Any]) -> None:
    """Writes result.json: how the run ended."""
    storage.write_bytes(os.path.join(run_dir, RESULT_NAME), json.dumps(_mask(drop_non_finite(result))).encode())


def _mask(result: Mapping[str, Any]) -> dict[str, Any]:
    """`result` with values of environment variables masked, except in paths, which contain none."""
    return {key: value if key in ("run_dir", "checkpoint") else mask_texts(value) for key, value in result.items()}


def read_result(run_dir: str) -> dict[str, Any]:
    """A run's result.json; empty if there is none."""
    return read_json(os.path.join(run_dir, RESULT_NAME))


def supersede_metrics(run_dir: str, step: int) -> None:
    """Moves the records in metrics.jsonl of steps after `step`, which the run will repeat, to metrics-superseded.jsonl.

    At step 0 these are all records. A last line that a kill has truncated is moved too. Records are in the order of
    their steps, so this reads only what it moves. If this function is killed, nothing is lost, and the next run that
    starts at the same step completes the move.
    """
    path, aside = (os.path.join(run_dir, name) for name in (METRICS_NAME, SUPERSEDED_METRICS_NAME))
    if not os.path.exists(path):
        return
    with open_update(path) as file:
        size, kept = file.seek(0, os.SEEK_END), _find_kept(file, step)
        if kept < size:
            _append_once(file, kept, aside)
            file.truncate(kept)
        if kept and not _ends_line(file):
            file.write(b"\n")
        os.fsync(file.fileno())


def _find_kept(file: BinaryIO, step: int) -> int:
    """The offset behind the last complete record of a step that is not after `step`."""
    for offset, line in read_lines_backwards(file) if step else ():
        if _is_of(line, step):
            end = offset + len(line)
            return min(end + 1, file.seek(0, os.SEEK_END))  # with its newline
    return 0


def _append_once(file: BinaryIO, begin: int, path: str) -> None:
    """Appends the lines of `file` from `begin` on to the file `path`, unless it ends with them already, because a kill
    came before they were removed from `file`."""
    with open_append(path) as there:
        size = file.seek(0, os.SEEK_END) - begin + (not _ends_line(file))
        if os.path.getsize(path) >= size:
            with open(path, "rb") as other:
                other.seek(-size, os.SEEK_END)
                if all(block == other.read(len(block)) for block in _read_blocks(file, begin)):
                    return
        for block in _read_blocks(file, begin):
            there.write(block)
        there.flush()
        os.fsync(there.fileno())
    sync_names(os.path.dirname(path))


def _read_blocks(file: BinaryIO, begin: int) -> Iterator[bytes]:
    """A file from `begin` on, in blocks, and a newline if its last line has none."""
    file.seek(begin)
    while block := file.read(1 << 20):
        yield block
    if not _ends_line(file):
        yield b"\n"


def _ends_line(file: BinaryIO) -> bool:
    """Whether the last byte of a file is a newline. Leaves the file at its end."""
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _is_of(line: bytes, step: int) -> bool:
    """Whether a line is a complete record of a step that is not after `step`."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (KeyError, TypeError, ValueError):
        return False


def read_json(path: str) -> dict[str, Any]:
    """A JSON object in a file; empty if there is no file. Raises DsjobError if it is something else."""
    if not os.path.exists(path):
        return {}
    try:
        content = json.loads(storage.read_text(path))
    except (ValueError, RecursionError) as error:
        raise DsjobError(
            f"{path} is not JSON: {str(error)[:200]}", hint="delete it, or choose another folder"
        ) from None
    if not isinstance(content, dict):
        raise DsjobError(f"{path} is not a JSON object", hint="delete it, or choose another folder")
    return content


def list_commits(run_dir: str, document: Mapping[str, Any]) -> list[str]:
    """The names of the commit records of the run's checkpoints, which are in `checkpoint.dir`."""
    url = document["checkpoint"].get("dir") or os.path.join(run_dir, "checkpoints")
    return storage.list_names(storage.join(url, "commits"))


def drop_non_finite(value: Any) -> Any:
    """`value` with None for every nan and inf, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: drop_non_finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
