"""The named mesh of a job: each rank's position along `pipe`, `replicate`, `shard`, `context` and `tensor`.

Every mesh has all five axes, so that code can look one up by name whether or not the job uses it. An axis of size 1
costs no communicator. An axis that spans the whole job reuses the group of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dsjob.torch_private import make_group, make_group_of_one


class Axes(NamedTuple):
    """The number of ranks along each axis, outermost first.

    Consecutive ranks differ in the innermost axis first, and usually share a machine. So the axes that communicate most
    often are innermost: `tensor` and `context` within each layer, `shard` once per layer, `replicate` once per step.
    `pipe` sends the least: activations between stages, from one rank to one other rank.
    """

    pipe: int = 1  # stages of one model
    replicate: int = 1  # copies of the sharded state, trained on different data
    shard: int = 1  # parts of the state, trained on different data
    context: int = 1  # parts of one sequence
    tensor: int = 1  # parts of each layer


def list_lines(places: torch.Tensor, axis: str) -> torch.Tensor:
    """The ranks that differ only along an axis: int [groups, size of the axis]. places: int, with a dim for each axis
    of `Axes`: the rank at each place of the mesh."""
    along = Axes._fields.index(axis)
    return places.movedim(along, -1).reshape(-1, places.shape[along])


def form_groups(lines: torch.Tensor, timeout: float) -> dist.ProcessGroup:
    """The group of this rank's row of ranks, int [groups, size]. Every rank is in one row. A collective."""
    if len(lines) == 1 and lines[0].tolist() == list(range(lines.shape[1])):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    made = make_group(lines.sort(1).values.tolist(), timedelta(seconds=timeout))
    assert made is not None
    return made


def build_mesh(
    axes: Axes,
    device_type: str,
    *,
    ranks: Sequence[int] = (),
    groups: Mapping[str, dist.ProcessGroup] | None = None,
    timeout: float = 1800.0,
) -> DeviceMesh:
    """Builds a mesh with the axes and sizes of `axes`.

    `ranks`: the ranks of the job in mesh order, the last axis varying fastest; 0, 1, 2, ... if empty. `groups`: this
    rank's existing group along each axis of size 2 or more (and `shard`). If empty, all ranks create the groups here,
    in a collective, with `timeout` for what is done in them, in seconds.
    """
    known = dict(groups or {})
    # FSDP2 and code like it communicates along `shard` even if that is a single rank.
    missing = {name: size for name, size in axes._asdict().items() if size > 1 or name == "shard"}
    # int [pipe, replicate, shard, context, tensor]: the rank at each place of the mesh.
    places = torch.tensor(ranks or range(math.prod(axes)), dtype=torch.int).view(axes)
    if not known:
        known = {name: form_groups(list_lines(places, name), timeout) for name in missing}
    assert known.keys() == missing.keys()
    # Nothing should communicate along an axis of size 1: see `make_group_of_one`.
    alone = dist.group.WORLD if dist.get_world_size() == 1 else make_group_of_one()
    listed: list[Any] = [known.get(name, alone) for name in axes._fields]
    return DeviceMesh.from_group(listed, device_type, mesh=places, mesh_dim_names=axes._fields)
