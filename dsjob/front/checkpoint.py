"""Finds the checkpoint that a user names, and the job that saved it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from dsjob import document as documents
from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.averages import has_averages
from dsjob.checkpoint.root.best import choose_weights
from dsjob.checkpoint.root.run_state import read_job
from dsjob.checkpoint.root.source import locate, renamed
from dsjob.contract.access import comes_from_elsewhere
from dsjob.document import Document
from dsjob.document.origins import read_document
from dsjob.run_folder import RESOLVED_NAME
from dsjob.trust.grant import Trust
from dsjob.trust.user import Flags, grant


@dataclass(frozen=True)
class Chosen:
    """A checkpoint of dsjob's, and its job.

    url: its folder. averages: whether it has averages of weights beside the weights. run_dir: the folder of the run
    that saved it, if it is there and belongs to this user. file: the run's document, or otherwise the copy in the
    checkpoint; None if the checkpoint was not saved by a job.
    """

    url: str
    tag: str
    step: int
    averages: bool
    run_dir: str | None
    file: Document | None

    def describe_weights(self, *, ema: bool) -> str:
        """Which weights a task uses, if the checkpoint has averages, too."""
        if not self.averages:
            return ""
        return "the averages of its weights" if ema else "its weights; --ema uses their averages"

    def grant(self, flags: Flags) -> Trust:
        """What the job may import: the user's own modules only if its document is the run's."""
        return grant(self.file, flags) if self.run_dir is not None else replace(grant(self.file, flags), local=False)


def choose_checkpoint(source: str, tag: str | None, *, best: bool = False) -> Chosen:
    """The checkpoint that `source` names: a run's folder, a checkpoint folder, or the folder of one step in it.

    tag: by default the newest, or the best if the job has `checkpoint.load_best_at_end`. best: choose the best by
    `checkpoint.best` instead. Raises NoCheckpointError, CorruptCheckpointError, StorageError, UsageError.
    """
    tag = choose_weights(source, tag, best=best)
    with renamed(f"load {source}"):
        place, record = locate(source, tag)
        checkpoint = layout.read_checkpoint(place, record)
        kept = read_job(place, checkpoint)
    averages = has_averages(checkpoint)
    url, above = storage.join(place.root, checkpoint.folder), os.path.dirname(place.root.rstrip("/"))
    resolved = os.path.join(above, RESOLVED_NAME)
    if storage.is_local(place.root) and os.path.isfile(resolved) and not comes_from_elsewhere(resolved):
        shown = above if os.path.isabs(storage.local_path(source)) else os.path.relpath(above)
        return Chosen(url, checkpoint.tag, checkpoint.step, averages, shown, read_document(resolved))
    copy = storage.join(url, "job.json")
    file = None if kept is None else documents.require_few(documents.parse(storage.read_text(copy), copy))
    return Chosen(url, checkpoint.tag, checkpoint.step, averages, None, file)
