"""Reads the plain values of a checkpoint, `state.json` and `job.json`, with limits on their size and checks of their
form. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.root.source import renamed
from dsjob.errors import CheckpointError, CorruptCheckpointError, DsjobError


def read_values(root: layout.Folder, checkpoint: layout.Checkpoint) -> dict[str, Any]:
    """Reads `state.json`: counters, schedule, the optimizer's plain values, random generators by rank."""
    values = _read(root, checkpoint, "state")
    if values is None:
        raise CorruptCheckpointError(f"{root.root}/{checkpoint.folder}/state.json is missing", hint=layout.ELSEWHERE)
    for key in ("counters", "optimizer", "rng", "client_state"):
        if not isinstance(values.get(key), dict):
            place = f"{root.root}/{checkpoint.folder}/state.json"
            raise CorruptCheckpointError(f"{place}: {key} is missing, or not a JSON object", hint=layout.ELSEWHERE)
    return values


def read_job(root: layout.Folder, checkpoint: layout.Checkpoint) -> dict[str, Any] | None:
    """Reads `job.json`, the resolved document. None if the checkpoint was not saved by a job."""
    return _read(root, checkpoint, "job")


@contextmanager
def restoring(url: str) -> Iterator[None]:
    """Turns errors from restoring malformed values into CorruptCheckpointError: values are not checked one by one.

    Errors that say nothing about the checkpoint pass unchanged: MemoryError, and those of devices and process groups
    (subclasses of RuntimeError). An older checkpoint would not help against them.
    """
    try:
        yield
    except DsjobError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        kind = type(error)
        if isinstance(error, RuntimeError) and kind not in (RuntimeError, RecursionError):
            raise
        what = f"cannot restore the state in {url}: {kind.__name__}: {str(error)[:200]}"
        if kind is RuntimeError:  # torch raises it both for values that do not fit and for failing devices
            raise CheckpointError(what) from error
        raise CorruptCheckpointError(what, hint=layout.ELSEWHERE) from error


def _read(root: layout.Folder, checkpoint: layout.Checkpoint, name: str) -> dict[str, Any] | None:
    digest = checkpoint.manifest.get(f"{name}_sha256")
    with renamed(f"read {root.root}"):
        if digest is None and f"{name}.json" not in root.names(checkpoint.folder):
            return None
        return layout.read_object(root, f"{checkpoint.folder}/{name}.json", layout.MAX_MANIFEST, str(digest or ""))
