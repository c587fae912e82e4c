"""Builds the checkpointer of a run: where it saves, what it keeps, and which checkpoints it may delete."""

from __future__ import annotations

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.objects import Kept
from dsjob.checkpoint.root.attempts import Lineage
from dsjob.checkpoint.root.retention import Best, Retention
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import Checkpoint
from dsjob.document.origins import PROGRAM
from dsjob.ranks.mesh import World
from dsjob.trust.grant import Trust
from dsjob.trust.named import locate


def build_checkpointer(
    job: ResolvedJob, run_dir: str, world: World, trust: Trust, objects: Kept | None = None
) -> Checkpointer:
    """The checkpointer of a run, for `checkpoint.dir` or the folder `checkpoints` in `run_dir`. Does no I/O yet.

    `trust`: has the places that the user has named. `objects`: callbacks, metrics and data whose state is saved in
    checkpoints.
    """
    section = job.spec.checkpoint
    return Checkpointer(
        section.dir or storage.join(run_dir, "checkpoints"),
        world=world,
        retention=_build_retention(section),
        lineage=_find_lineage(job, run_dir, trust),
        job=job.document,
        single_writer=section.single_writer,
        timeout=job.spec.launch.timeout,
        objects=objects,
    )


def _find_lineage(job: ResolvedJob, run_dir: str, trust: Trust) -> Lineage:
    """Whose checkpoints the run may delete. The document alone cannot make those of another run its own."""
    file, folder = job.given.get("file"), locate(run_dir)
    named = locate(job.spec.checkpoint.dir or run_dir) in trust.writes
    return Lineage(file, folder, resumed=folder in trust.writes, everything=named or file in (None, PROGRAM))


def _build_retention(section: Checkpoint) -> Retention:
    return Retention(section.keep, section.keep_every, Best.of(section.best))
