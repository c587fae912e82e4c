"""Divides the ranks of a job among the axes of its mesh: pipeline stages, parts of sequences, parts of layers, data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dsjob.errors import UsageError
from dsjob.ranks.axes import Axes, form_groups, list_lines
from dsjob.ranks.mesh import Ranks, World
from dsjob.ranks.topology import ProcessTopology, order_ranks
from dsjob.torch_private import make_group

_WITHIN_MODEL = ("pipe", "context", "tensor")


def divide_axes(world: World, *, pipe: int = 1, context: int = 1, tensor: int = 1, order: Sequence[int] = ()) -> World:
    """Divides `world`, all ranks of the job: pipe x context x tensor ranks hold each copy of the model, and the copies
    are trained on different data. A collective, unless all three are 1; then `world` itself is returned.

    order: the ranks of the job in the order of `Axes`; 0, 1, 2, ... if empty. Raises UsageError if the ranks do not
    divide into such groups.
    """
    parts, ranks = pipe * context * tensor, world.everyone.size
    if parts == 1:
        return world
    if ranks % parts:
        raise UsageError(
            f"{ranks} rank{'s do' if ranks > 1 else ' does'} not divide into groups of {parts}, which hold one"
            " model each",
            hint=f"start {parts * max(1, ranks // parts)} ranks",
        )
    axes = Axes(pipe, 1, ranks // parts, context, tensor)
    # int [pipe, replicate, shard, context, tensor]: the rank at each place.
    places = torch.tensor(order or range(ranks), dtype=torch.int64).view(axes)
    along = {name: _find_along(world, places, axes, name) for name in _WITHIN_MODEL}
    data = _find_along(world, places, axes, "shard", always=True)
    return dataclasses.replace(
        world,
        data_rank=data.rank,
        data_size=data.size,
        data_group=data.group,
        model=_join_model(world, places, along),
        pipe=along["pipe"],
        context=along["context"],
        tensor=along["tensor"],
        order=tuple(order),
    )


def divide_by(topology: ProcessTopology, world: World) -> World:
    """Divides `world` like `divide_axes`, by the axes `pipe`, `data` and `model` of a topology, in its order."""
    pipe, tensor = (max(topology.get_dim(axis), 1) for axis in ("pipe", "model"))
    return divide_axes(world, pipe=pipe, tensor=tensor, order=order_ranks(topology))


def _find_along(world: World, places: torch.Tensor, axes: Axes, name: str, *, always: bool = False) -> Ranks:
    """This rank's place and group along an axis. A collective if the axis has several ranks, or `always`."""
    size = getattr(axes, name)
    if size == 1 and not always:
        return Ranks(timeout=world.timeout)
    return _form(list_lines(places, name), world)


def _join_model(world: World, places: torch.Tensor, along: dict[str, Ranks]) -> Ranks:
    """The ranks that hold one copy of the model. A collective, unless they lie along a single axis."""
    several = [ranks for ranks in along.values() if ranks.size > 1]
    if len(several) == 1:
        return several[0]
    size = math.prod(ranks.size for ranks in several)
    return _form(places.movedim((1, 2), (0, 1)).reshape(-1, size), world)


def _form(lines: torch.Tensor, world: World) -> Ranks:
    """The group of this rank's row of ranks, int [groups, size], and its place in it. A collective."""
    group = form_groups(lines, world.timeout)
    return Ranks(dist.get_rank(group), dist.get_world_size(group), group, world.timeout)


def join_along(world: World, axis: str, places: Sequence[int]) -> Ranks:
    """This rank and those at `places` along an axis, with the same coordinates otherwise: their group, and this rank's
    place in it. A rank at none of them gets a group of itself. A collective of all ranks, which pass the same places.
    """
    whole = world.along(axis)
    if tuple(places) == tuple(range(whole.size)):
        return whole
    ranks = torch.tensor(world.order or range(world.everyone.size), dtype=torch.int64).view(world.axes)
    lines = list_lines(ranks, axis)
    made = make_group(lines[:, list(places)].sort(1).values.tolist(), timedelta(seconds=world.timeout))
    if made is None:
        return Ranks(timeout=world.timeout)
    return Ranks(dist.get_rank(made), dist.get_world_size(made), made, world.timeout)
