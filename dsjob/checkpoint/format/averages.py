"""Averages of weights in checkpoints: those that `dsjob.callbacks.EMA` keeps."""

from __future__ import annotations

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import AVERAGE
from dsjob.errors import UsageError


def has_averages(checkpoint: layout.Checkpoint) -> bool:
    """Whether a checkpoint holds averages."""
    return bool(_find_averages(checkpoint))


def take_averages(checkpoint: layout.Checkpoint) -> layout.Checkpoint:
    """The checkpoint with averages in place of the weights that have one. Raises UsageError if there are none."""
    found = _find_averages(checkpoint)
    if not found:
        raise UsageError(
            f"the checkpoint {checkpoint.tag} contains no averages of weights",
            hint="train with the callback dsjob.callbacks.EMA, or leave out --ema",
        )
    tensors = {
        name: found[name]._replace(role=tensor.role) if name in found else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return checkpoint._replace(tensors=tensors)


def _find_averages(checkpoint: layout.Checkpoint) -> dict[str, layout.Tensor]:
    """By the names of their weights."""
    return {
        f"model.{name.removeprefix('optimizer.').removesuffix(f'.{AVERAGE}')}": tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith("optimizer.") and name.endswith(f".{AVERAGE}")
    }
