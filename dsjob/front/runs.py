"""Finds runs below a folder, and compares two of them. Reads only the ends of files that grow with a run."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dsjob import provenance, storage
from dsjob.contract.lengths import read_length
from dsjob.contract.paths import get_at
from dsjob.errors import DsjobError, UsageError
from dsjob.files import open_read, read_lines_backwards
from dsjob.run_folder import (
    METRICS_NAME,
    PROGRAM_NAME,
    RESOLVED_NAME,
    is_running,
    read_json,
    read_record,
    read_resolved,
    read_result,
)

Status = Literal["running", "done", "unsaved", "failed", "stopped", "killed", "unreadable"]
_POINTS = 24  # losses of a run that are read for a curve
_WHOLE = 64 << 10  # bytes of metrics.jsonl up to which it is read whole
_LINE = 4 << 10  # bytes that are read at each of the points of a larger one
_LAST = 200  # lines at the end of metrics.jsonl to search for the last evaluation
_DEEPEST = 6  # levels of folders below the one that is asked for


@dataclass(frozen=True)
class RunInfo:
    """A run of a job, or of a program under `dsjob exec`, as its folder shows it.

    folder: its path. name: of the job or program. status: `running`; `done`, or `unsaved` if the final state could not
    be saved; `failed`; `stopped` by a signal; `killed` if it ended without a word; `unreadable` if its files are
    damaged. step: the last logged step, of max_steps;
    None if unknown, as the latter if tokens or time end the run. metric: the metric of checkpoint.best, or else
    eval/loss or loss. best: its best value among the checkpoints, if the job has checkpoint.best. last: its last value.
    updated: when the run last wrote a record, in seconds since 1970. losses: the loss at about 24 points, in order.
    """

    folder: str
    name: str
    status: Status
    step: int | None = None
    max_steps: int | None = None
    metric: str = "loss"
    best: float | None = None
    last: float | None = None
    updated: float = 0.0
    losses: Sequence[float] = field(default=(), repr=False)


def list_runs(folder: str = "outputs") -> list[RunInfo]:
    """The runs in a folder and the folders below it, the one that was written last first.

    Raises UsageError if there is no such folder.
    """
    if not os.path.isdir(folder):
        raise UsageError(f"there is no folder {folder}", hint="name a folder that contains runs")
    return sorted(map(describe, _find(folder, 0)), key=lambda run: (-run.updated, run.folder))


def _find(folder: str, depth: int) -> Iterator[str]:
    if any(os.path.exists(os.path.join(folder, name)) for name in (RESOLVED_NAME, PROGRAM_NAME)):
        if not _is_task(folder):
            yield folder
        return
    try:
        with os.scandir(folder) as entries:
            below = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
    except OSError:  # another user's
        return
    for path in below if depth < _DEEPEST else ():
        yield from _find(path, depth + 1)


def _is_task(folder: str) -> bool:
    """Whether a folder belongs to an evaluation or a prediction, which trains nothing."""
    try:
        tasks = read_resolved(folder).get("tasks")
    except DsjobError:  # listed as unreadable
        return False
    return isinstance(tasks, list) and bool(tasks) and "train" not in tasks


def describe(folder: str) -> RunInfo:
    """The run in a folder."""
    try:
        document, result = read_document(folder), read_result(folder)
        best, metric = _find_best(folder, document)
        last = read_last(folder)
    except (DsjobError, OSError):
        return RunInfo(folder, os.path.basename(os.path.abspath(folder)), "unreadable")
    if not metric:
        metric = "eval/loss" if "eval/loss" in last else "loss"
    found = "running" if is_running(folder) else result.get("status", "killed")
    status: Any = found if found in get_args(Status) else "unreadable"
    step = last.get("step", result.get("step"))
    return RunInfo(
        folder,
        str(document.get("name", "")),
        status,
        step if isinstance(step, int) else None,
        _count_steps(document.get("trainer"), last),
        metric,
        best,
        _as_number(last.get(metric)),
        _find_time(folder),
        _sample_losses(os.path.join(folder, METRICS_NAME)),
    )


def _count_steps(given: Any, last: Mapping[str, Any]) -> int | None:
    """The steps of a whole run with the section trainer `given`, of which `last` is the last record. None if tokens or
    time end it."""
    trainer = given if isinstance(given, Mapping) else {}
    step, epoch, batch = map(_as_number, (last.get("step"), last.get("epoch"), trainer.get("train_batch")))
    each = {"steps": 1.0, "epochs": step / epoch if step and epoch else None, "samples": 1 / batch if batch else None}
    limits = [(_as_number(trainer.get("max_steps")), "steps"), (_as_number(trainer.get("max_epochs")), "epochs")]
    with suppress(AssertionError, KeyError, TypeError, ValueError):  # unset, or damaged
        length = read_length(trainer["max_length"])
        limits.append((_as_number(length.amount), length.unit))
    counts = [amount * share for amount, unit in limits if amount is not None and (share := each.get(unit)) is not None]
    known = [count for count in counts if math.isfinite(count)]
    return math.ceil(round(min(known), 6)) if known else None


def read_document(folder: str) -> dict[str, Any]:
    """The document of the job in a folder. For a program, its name, command and engine, and DeepSpeed's config. Raises
    DsjobError."""
    path = os.path.join(folder, PROGRAM_NAME)
    if not os.path.exists(path) or os.path.exists(os.path.join(folder, RESOLVED_NAME)):
        return read_resolved(folder)
    program = read_json(path)
    words = program.get("command")
    command = [str(word) for word in words] if isinstance(words, list) and words else ["program"]
    name = os.path.basename(command[0].rstrip("/")).removesuffix(".py")
    config = read_json(os.path.join(folder, "deepspeed.json"))
    own = {"command": command, "engine": program.get("engine"), "ranks": program.get("ranks")}
    return {"name": name, **own, "deepspeed": config}


def _as_number(value: Any) -> float | None:
    """A finite number; None for anything else that a damaged file may hold."""
    return float(value) if type(value) in (int, float) and abs(value) <= sys.float_info.max else None


def _find_time(folder: str) -> float:
    """When the run last wrote a record, or else, its document."""
    for name in (METRICS_NAME, RESOLVED_NAME, PROGRAM_NAME):
        with suppress(OSError):
            return os.stat(os.path.join(folder, name)).st_mtime
    return 0.0


def _find_best(folder: str, document: Mapping[str, Any]) -> tuple[float | None, str]:
    """The best value among a run's checkpoints, and the name of the metric; both empty without checkpoint.best."""
    wanted = get_at(document, ("checkpoint", "best"))
    if not isinstance(wanted, dict):
        return None, ""
    metric, commits = str(wanted.get("metric", "eval/loss")), list_commits(folder, document)
    found = [value for each in commits if (value := _as_number(get_at(each, ("metrics", metric)))) is not None]
    return (max if wanted.get("mode") == "max" else min)(found, default=None), metric


def list_commits(folder: str, document: Mapping[str, Any]) -> Iterator[Any]:
    """The commit records of a run's checkpoints, if they are on this machine."""
    given, own = get_at(document, ("checkpoint", "dir")), os.path.join(folder, "checkpoints")
    commits = os.path.join(given if given and isinstance(given, str) else own, "commits")
    if storage.is_local(commits) and os.path.isdir(commits):
        for name in os.listdir(commits):
            with suppress(DsjobError, ValueError, RecursionError):
                yield json.loads(storage.read_text(os.path.join(commits, name)))


def read_last(folder: str) -> dict[str, Any]:
    """The values of a run's last log record and last evaluation, if they are near the end of metrics.jsonl."""
    path, found = os.path.join(folder, METRICS_NAME), dict[str, Any]()
    if not os.path.exists(path):
        return found
    with open_read(path) as file:
        for count, (_, line) in enumerate(read_lines_backwards(file)):
            record = read_record(line)
            found = {**record, **found}
            if count == _LAST or (count > 1 and {"loss", "eval/loss"} <= found.keys()):
                break
    return found


def _sample_losses(path: str) -> list[float]:
    if not os.path.exists(path):
        return []
    with open_read(path) as file:
        size = file.seek(0, os.SEEK_END)
        if size <= _WHOLE:
            file.seek(0)
            losses = [loss for line in file.read(size).splitlines() if (loss := _read_loss(line)) is not None]
            if len(losses) <= _POINTS:
                return losses
            return [losses[round(i * (len(losses) - 1) / (_POINTS - 1))] for i in range(_POINTS)]
        blocks = []
        for point in range(_POINTS):
            file.seek((size - _LINE) * point // (_POINTS - 1))
            blocks.append(file.read(_LINE).splitlines()[1:-1])  # the first and the last may be parts of lines
    found = (next((loss for line in lines if (loss := _read_loss(line)) is not None), None) for lines in blocks)
    return [loss for loss in found if loss is not None]


def _read_loss(line: bytes) -> float | None:
    return _as_number(read_record(line).get("loss"))


@dataclass(frozen=True)
class Compared:
    """What differs between two runs, by dotted path: values of their documents, and what they ran with; and their last
    metrics."""

    document: Mapping[str, tuple[Any, Any]]
    metrics: Mapping[str, tuple[Any, Any]]
    environment: Mapping[str, tuple[Any, Any]]


def compare_runs(first: str, second: str) -> Compared:
    """Compares the documents, the environments and the last metrics of the runs in two folders.

    Raises UsageError for other folders.
    """
    for folder in (first, second):
        if not any(os.path.exists(os.path.join(folder, name)) for name in (RESOLVED_NAME, PROGRAM_NAME)):
            raise UsageError(f"{folder} is not the folder of a run", hint="dsjob runs lists runs and their folders")
    documents = [dict(_list_leaves(read_document(folder))) for folder in (first, second)]
    for document in documents:
        document.pop("output.dir", None)
    last = [read_last(folder) for folder in (first, second)]
    metrics = [{name: value for name, value in each.items() if _as_number(value) is not None} for each in last]
    names = [name for name in dict.fromkeys([*metrics[0], *metrics[1]]) if name != "eta_seconds"]
    return Compared(
        {path: pair for path, pair in _pair(documents).items() if pair[0] != pair[1]},
        {name: (metrics[0].get(name), metrics[1].get(name)) for name in names},
        provenance.list_differing(provenance.read(first), provenance.read(second)),
    )


def _pair(documents: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
    paths = dict.fromkeys([*documents[0], *documents[1]])
    return {path: (documents[0].get(path), documents[1].get(path)) for path in paths}


def _list_leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if not above and key == "resolved":  # how the document was derived
            continue
        if isinstance(item, dict) and item:
            yield from _list_leaves(item, f"{above}{key}.")
        else:
            yield f"{above}{key}", item


def describe_age(run: RunInfo) -> float:
    """Seconds since the run last wrote a record."""
    return max(0.0, time.time() - run.updated)
