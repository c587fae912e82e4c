"""Builds the checkpointer of a run: where it saves, what it keeps, and which checkpoints it may delete."""

from __future__ import annotations

import os

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.objects import Kept
from dsjob.checkpoint.root.attempts import Lineage
from dsjob.checkpoint.root.retention import Best, Retention
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import Checkpoint
from dsjob.document.origins import COMMAND_LINE, PROGRAM
from dsjob.ranks.mesh import World


def build_checkpointer(job: ResolvedJob, run_dir: str, world: World, objects: Kept | None = None) -> Checkpointer:
    """The checkpointer of a run, for `checkpoint.dir` or the folder `checkpoints` in `run_dir`. Does no I/O yet.

    `objects`: callbacks, metrics and data whose state is saved in checkpoints.
    """
    section = job.spec.checkpoint
    return Checkpointer(
        section.dir or storage.join(run_dir, "checkpoints"),
        world=world,
        retention=_build_retention(section),
        lineage=_find_lineage(job, run_dir),
        job=job.document,
        single_writer=section.single_writer,
        timeout=job.spec.launch.timeout,
        objects=objects,
    )


def _find_lineage(job: ResolvedJob, run_dir: str) -> Lineage:
    """Whose checkpoints the run may delete. The document alone cannot make those of another run its own."""
    file, origins = job.given.get("file"), job.given.get("origins", {})
    named = {key for key in ("checkpoint.dir", "output.dir") if str(origins.get(key)).startswith(COMMAND_LINE)}
    root = "checkpoint.dir" if job.spec.checkpoint.dir else "output.dir"
    return Lineage(
        file,
        os.path.abspath(run_dir),
        resumed="output.dir" in named,
        everything=file in (None, PROGRAM) or root in named,
    )


def _build_retention(section: Checkpoint) -> Retention:
    return Retention(section.keep, section.keep_every, Best.of(section.best))
