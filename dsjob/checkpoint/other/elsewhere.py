"""Finds checkpoints of other programs at any path or URL. Only this module knows which kinds are supported."""

from __future__ import annotations

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.other.deepspeed.reader import find_deepspeed
from dsjob.checkpoint.other.deepspeed.state import Groups
from dsjob.checkpoint.other.foreign import Foreign
from dsjob.checkpoint.other.plain_weights import find_weights
from dsjob.checkpoint.root.source import locate, open_root, renamed


def find_elsewhere(url: str, tag: str | None = None, groups: Groups | None = None) -> Foreign | None:
    """What another program saved there: a DeepSpeed checkpoint, or plain weights. None for anything else.

    A root of dsjob's own checkpoints is always None, even if no save there was completed, and even if it also contains
    plain weights, as the folders of HF's Trainer do. `groups`: see `find_deepspeed`. Raises CheckpointError,
    NoCheckpointError, Damaged (see `zero_to_fp32`).
    """
    if not {"attempts", "commits"}.isdisjoint(open_root(url).names("")):
        return None
    found = find_deepspeed(url, tag, groups)
    return found if found is not None or tag is not None else find_weights(url)


def is_own(url: str, tag: str | None = None) -> bool:
    """True if `url`, or `tag` in the root at `url`, is one of dsjob's own checkpoints; False if another program's.

    Raises NoCheckpointError if it is neither, and the errors of `find_elsewhere`.
    """
    with renamed(f"read {url}"):
        try:
            layout.find_commit(open_root(url), tag) if tag else locate(url)
            return True
        except layout.NothingThere:
            if find_elsewhere(url, tag) is None:
                raise
            return False
