"""The plain values of a checkpoint, `state.json` and `job.json`: read within bounds, and refused where they are not of
the form that is saved. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.root.source import renamed
from dsjob.errors import CheckpointError, CorruptCheckpointError, DsjobError


def read_values(root: layout.Folder, checkpoint: layout.Checkpoint) -> dict[str, Any]:
    """`state.json`: counters, schedule, what the optimizer has beside tensors, random generators by rank."""
    values = _read(root, checkpoint, "state")
    if values is None:
        raise CorruptCheckpointError(f"{root.root}/{checkpoint.folder}/state.json is missing", hint=layout.ELSEWHERE)
    for key in ("counters", "optimizer", "rng", "client_state"):
        if not isinstance(values.get(key), dict):
            place = f"{root.root}/{checkpoint.folder}/state.json"
            raise CorruptCheckpointError(f"{place}: {key} is not there, or no JSON object", hint=layout.ELSEWHERE)
    return values


def read_job(root: layout.Folder, checkpoint: layout.Checkpoint) -> dict[str, Any] | None:
    """`job.json`: the resolved document; None where the checkpoint is not a job's."""
    return _read(root, checkpoint, "job")


@contextmanager
def restoring(url: str) -> Iterator[None]:
    """Renames what putting values back raises where they are not of the form that was saved: nothing checks each.

    What says nothing about the checkpoint passes: MemoryError, and those of devices and process groups (kinds of
    RuntimeError), after which an older checkpoint would fare no better.
    """
    try:
        yield
    except DsjobError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        kind = type(error)
        if isinstance(error, RuntimeError) and kind not in (RuntimeError, RecursionError):
            raise
        what = f"{url}: what it holds cannot be restored: {kind.__name__}: {str(error)[:200]}"
        if kind is RuntimeError:  # torch has no other for what does not fit, and for a device that fails
            raise CheckpointError(what) from error
        raise CorruptCheckpointError(what, hint=layout.ELSEWHERE) from error


def _read(root: layout.Folder, checkpoint: layout.Checkpoint, name: str) -> dict[str, Any] | None:
    digest = checkpoint.manifest.get(f"{name}_sha256")
    with renamed(f"read {root.root}"):
        if digest is None and f"{name}.json" not in root.names(checkpoint.folder):
            return None
        return layout.read_object(root, f"{checkpoint.folder}/{name}.json", layout.MAX_MANIFEST, str(digest or ""))
