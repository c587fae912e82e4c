"""Finds the best checkpoint of a root, as `checkpoint.best` of its job says. Imports no torch.

The commit records decide. The file `best` in the root, which names the tag, is for people and other programs.
"""

from __future__ import annotations

from typing import Any

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.root.catalog import Catalog
from dsjob.checkpoint.root.retention import Best
from dsjob.checkpoint.root.run_state import read_job
from dsjob.checkpoint.root.source import find_root, renamed
from dsjob.errors import NoCheckpointError, UsageError


def find_best(root: layout.Folder) -> dict[str, Any] | None:
    """The commit record of the best checkpoint; None if the job of the newest one has no `checkpoint.best`, or if no
    checkpoint has the metric. Raises the errors of `zero_to_fp32`."""
    best = _read_best(root)
    # The newest checkpoint's job decides what is best, since metrics may have changed between runs.
    chosen = best.choose(Catalog(root.root).records()) if best is not None else []
    return dict(chosen[0]) if chosen else None


def _read_best(root: layout.Folder) -> Best | None:
    job = read_job(root, layout.read_checkpoint(root, layout.find_commit(root))) or {}
    section = job.get("checkpoint")
    section = section.get("best") if isinstance(section, dict) else None
    if not isinstance(section, dict):
        return None
    return Best(section.get("metric", "eval/loss"), section.get("mode", "min"), 1)


def choose_tag(url: str, tag: str | None, *, best: bool) -> str | None:
    """The tag that a user asks for: `tag` itself, or with `best`, that of the best checkpoint in the root that `url`
    refers to (see `find_root`).

    Raises UsageError, NoCheckpointError, CorruptCheckpointError, StorageError.
    """
    if not best:
        return tag
    if tag is not None:
        raise UsageError("the best checkpoint and a tag cannot both be chosen", hint="leave one of them out")
    with renamed(f"read {url}"):
        root, name = find_root(url)
        if name:
            raise UsageError(f"{url} is already the folder of one step", hint="name its parent folder")
        if _read_best(root) is None:
            hint = "set checkpoint.best: {metric: eval/loss} in the job, or choose a checkpoint by its tag"
            raise UsageError(f"{root.root} has no best checkpoint: its job has no checkpoint.best", hint=hint)
        record = find_best(root)
    if record is None:
        raise NoCheckpointError(
            f"no checkpoint in {root.root} has the metric of checkpoint.best", hint="evaluate with trainer.eval_every=N"
        )
    return str(record["tag"])
