"""A small picture of a mesh: which ranks hold what, for people who start a run."""

from __future__ import annotations

import math

import torch

from dsjob.ranks.axes import Axes

_MOST = 64  # ranks that a picture shows


def describe_axes(axes: Axes) -> str:
    """The sizes of the axes along which there are several ranks: `2 pipe x 2 data x 2 tensor`."""
    sizes = {"pipe": axes.pipe, "data": axes.replicate * axes.shard, "context": axes.context, "tensor": axes.tensor}
    return " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)


def draw_mesh(axes: Axes, order: tuple[int, ...] = ()) -> list[str]:
    """Lines with the ranks: one for each pipeline stage, in it a group in brackets for each copy of the model. Ranks
    of a group divide layers; those separated by | divide sequences. No lines for a mesh that is too large."""
    data, ranks = axes.replicate * axes.shard, math.prod(axes)
    if ranks > _MOST:
        return []
    # int [pipe, data, context, tensor]
    places = torch.tensor(order or range(ranks)).view(axes.pipe, data, axes.context, axes.tensor)
    width = len(str(ranks - 1))
    lines = []
    for stage in range(axes.pipe):
        copies = [
            "[" + " | ".join(" ".join(f"{rank:>{width}}" for rank in part) for part in copy) + "]"
            for copy in places[stage].tolist()
        ]
        lines.append((f"stage {stage}  " if axes.pipe > 1 else "") + " ".join(copies))
    return lines
