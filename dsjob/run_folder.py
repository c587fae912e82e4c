"""A run's folder: how it is named and made, and the documents that lie in it.

`output.dir` is a pattern. Without `%time` the next run resumes in the same folder. resolved.json is replaced only once
the new run has made progress, so a mistake in an override spoils nothing. metrics.jsonl has each step once: lines of
steps that a run repeats move to metrics-superseded.jsonl, as commit records move to `superseded/`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from dsjob import storage
from dsjob.contract.environment import mask_texts
from dsjob.contract.paths import Path, get_at
from dsjob.errors import DsjobError, StorageError

RESOLVED_NAME = "resolved.json"
RESULT_NAME = "result.json"
METRICS_NAME = "metrics.jsonl"
SUPERSEDED_METRICS_NAME = "metrics-superseded.jsonl"
SAVE_REQUEST = "save-now"  # touched to have a checkpoint made


def make_run_dir(pattern: str, name: str) -> str:
    """The run's folder, made: `pattern` with `%name` and `%time` filled in, a new one where the time is in it.

    A job that Slurm has queued again goes on in the folder that it had.
    """
    record = _find_slurm_record(pattern, name)
    if record and os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and os.path.exists(record):
        return str(_read_json(record)["run_dir"])
    chosen = _make_run_dir(pattern, name)
    if record:
        storage.write_bytes(record, json.dumps({"run_dir": os.path.abspath(chosen)}).encode())
    return chosen


def _find_slurm_record(pattern: str, name: str) -> str | None:
    """Where the folder of this step of a Slurm job is written down, if a later start would not find it by its name."""
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
            os.makedirs(chosen, exist_ok="%time" not in pattern)  # two runs may start within a second
            return chosen
        except FileExistsError:
            if not os.path.isdir(chosen):
                raise DsjobError(f"cannot make the folder {chosen}: a file has that name") from None
            chosen, number = f"{stamped}-{number}", number + 1
        except OSError as error:
            raise DsjobError(
                f"cannot make the folder {chosen}: {error.strerror}", hint="choose another output.dir"
            ) from error


def write_resolved(run_dir: str, document: Mapping[str, Any]) -> None:
    """Writes resolved.json; what an earlier run said of its end is gone then.

    Raises StorageError where there is a folder in the place of that file: it stays.
    """
    result = os.path.join(run_dir, RESULT_NAME)
    if storage.is_local(result) and os.path.isdir(storage.local_path(result)):
        raise StorageError(f"{result} is a folder, and a run writes its result there", hint="choose another output.dir")
    storage.write_bytes(os.path.join(run_dir, RESOLVED_NAME), json.dumps(document, indent=2).encode() + b"\n")
    storage.delete(result, recursive=False)


def read_resolved(run_dir: str) -> dict[str, Any]:
    """The document that the run in a folder was last resolved to; empty where there is none."""
    return _read_json(os.path.join(run_dir, RESOLVED_NAME))


def describe_other_job(run_dir: str, document: Mapping[str, Any]) -> str:
    """Says of a folder that it holds the run of another model or data set, whose checkpoints would be continued."""
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
    """`result` without values of the environment; the places of the run and its checkpoint hold none."""
    return {key: value if key in ("run_dir", "checkpoint") else mask_texts(value) for key, value in result.items()}


def read_result(run_dir: str) -> dict[str, Any]:
    """A run's result.json; empty where there is none."""
    return _read_json(os.path.join(run_dir, RESULT_NAME))


def supersede_metrics(run_dir: str, step: int) -> None:
    """Moves the lines of metrics.jsonl of steps after `step`, which a run takes anew, to metrics-superseded.jsonl.

    At step 0 these are all; a last line that a kill has cut short goes too. A kill in here loses nothing; a run
    that then begins at the same step does what is left.
    """
    path, aside = (os.path.join(run_dir, name) for name in (METRICS_NAME, SUPERSEDED_METRICS_NAME))
    before = storage.read_bytes(path) if os.path.exists(path) else b""
    kept, moved = bytearray(), bytearray()
    for line in before.splitlines():
        (kept if step and _is_of(line, step) else moved).extend(line + b"\n")
    if kept == before:
        return
    there = storage.read_bytes(aside) if os.path.exists(aside) else b""
    if not there.endswith(moved):  # as it does where a kill has come between the two writes
        storage.write_bytes(aside, there + moved)
    storage.write_bytes(path, bytes(kept))


def _is_of(line: bytes, step: int) -> bool:
    """Whether a line is a whole record of a step up to `step`."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (KeyError, TypeError, ValueError):
        return False


def _read_json(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    try:
        content = json.loads(storage.read_text(path))
    except (ValueError, RecursionError) as error:
        raise DsjobError(
            f"{path} is not JSON: {str(error)[:200]}", hint="delete it, or choose another folder"
        ) from None
    if not isinstance(content, dict):
        raise DsjobError(f"{path} is no JSON object", hint="delete it, or choose another folder")
    return content


def list_commits(run_dir: str, document: Mapping[str, Any]) -> list[str]:
    """The commit records of the run's checkpoints, wherever its document puts them."""
    url = document["checkpoint"].get("dir") or os.path.join(run_dir, "checkpoints")
    return storage.list_names(storage.join(url, "commits"))


def drop_non_finite(value: Any) -> Any:
    """`value` with null for every nan and inf, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: drop_non_finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
