"""Averages of weights in checkpoints: those that `dsjob.callbacks.EMA` keeps."""

from __future__ import annotations

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.errors import UsageError


def has_averages(checkpoint: layout.Checkpoint) -> bool:
    """Whether a checkpoint holds averages."""
    return bool(layout.averages(checkpoint))


def take_averages(checkpoint: layout.Checkpoint) -> layout.Checkpoint:
    """The checkpoint with averages in place of the weights that have one. Raises UsageError if there are none."""
    try:
        return layout.with_averages(checkpoint)
    except layout.Refused as error:
        raise UsageError(error.message, hint=error.hint) from None
