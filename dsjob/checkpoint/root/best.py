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
from dsjob.errors import DsjobError, NoCheckpointError, UsageError


def find_best(root: layout.Folder) -> dict[str, Any] | None:
    """The commit record of the best checkpoint; None if the job of the newest one has no `checkpoint.best`, or if no
    checkpoint has the metric. Raises the errors of `zero_to_fp32`."""
    best = _read_best(_read_section(root))
    # The newest checkpoint's job decides what is best, since metrics may have changed between runs.
    chosen = best.choose(Catalog(root.root).records()) if best is not None else []
    return dict(chosen[0]) if chosen else None


def _read_section(root: layout.Folder) -> dict[str, Any]:
    """The section `checkpoint` of the job of the newest checkpoint; empty if it has none."""
    job = read_job(root, layout.read_checkpoint(root, layout.find_commit(root))) or {}
    section = job.get("checkpoint")
    return section if isinstance(section, dict) else {}


def _read_best(section: dict[str, Any]) -> Best | None:
    best = section.get("best")
    if not isinstance(best, dict) or best.get("mode") not in ("min", "max"):
        return None
    return Best(str(best.get("metric", "eval/loss")), best["mode"], 1)


def choose_weights(url: str, tag: str | None, *, best: bool) -> str | None:
    """Like `choose_tag`, where only weights are wanted: without a tag, the best checkpoint if the job of the newest one
    has `load_best_at_end`. None stands for the newest."""
    if best or tag is not None:
        return choose_tag(url, tag, best=best)
    try:
        root, name = find_root(url)
        wanted = not name and _read_section(root).get("load_best_at_end") is True
        record = find_best(root) if wanted else None
    except (layout.Problem, DsjobError, OSError):  # also what another program saved; whoever reads it reports it
        return None
    return str(record["tag"]) if record is not None else None


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
        if _read_best(_read_section(root)) is None:
            hint = "set checkpoint.best: {metric: eval/loss} in the job, or choose a checkpoint by its tag"
            raise UsageError(f"{root.root} has no best checkpoint: its job has no checkpoint.best", hint=hint)
        record = find_best(root)
    if record is None:
        raise NoCheckpointError(
            f"no checkpoint in {root.root} has the metric of checkpoint.best", hint="evaluate with trainer.eval_every=N"
        )
    return str(record["tag"])
