"""The named mesh of a job: where each rank stands along `pipe`, `replicate`, `shard`, `context` and `tensor`.

Every mesh has all five axes, so that code can ask for one by name whether or not the job spreads anything along it. An
axis of size 1 costs no communicator. Neither does one as long as the job, which takes the group of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dsjob.torch_private import make_group_of_one


class Axes(NamedTuple):
    """How many ranks lie along each axis, from the outermost to the innermost.

    Ranks with successive numbers differ in the innermost axis first, and usually share a machine. So what communicates
    most often is innermost: `tensor` and `context` inside each layer, `shard` once a layer, `replicate` once a step.
    `pipe` sends the least: the activations at the borders of stages, from one rank to one other.
    """

    pipe: int = 1  # stages of one model, one after the other
    replicate: int = 1  # copies of the sharded state, trained on other data
    shard: int = 1  # parts of the state, trained on other data
    context: int = 1  # parts of one sequence
    tensor: int = 1  # parts of each layer


def build_mesh(
    axes: Axes,
    device_type: str,
    *,
    ranks: Sequence[int] = (),
    groups: Mapping[str, dist.ProcessGroup] | None = None,
) -> DeviceMesh:
    """A mesh with the axes of `Axes`, and these sizes.

    `ranks`: the ranks of the job in the order of the mesh, the last axis fastest; 0, 1, 2, ... if empty. `groups`: this
    rank's along axes that a program has made groups for. Either it has done so for all axes longer than 1, or for
    none; then all ranks of the job make them here together.
    """
    known = dict(groups or {})
    # FSDP2 and its kind communicate along `shard` also where that is one rank.
    missing = {name: size for name, size in axes._asdict().items() if size > 1 or name == "shard"}
    if not known:
        # DeviceMesh takes the group of all ranks for an axis as long as the job. The others split NCCL's communicator
        # in one call per axis, where `new_group` would be a call for each group of the whole job.
        made = init_device_mesh(device_type, tuple(missing.values()), mesh_dim_names=tuple(missing))
        known = {name: made.get_group(name) for name in missing}
    assert known.keys() == missing.keys()
    places = torch.tensor(ranks or range(math.prod(axes)), dtype=torch.int).view(axes)
    # Nothing should communicate along an axis of size 1: see `make_group_of_one`.
    alone = dist.group.WORLD if dist.get_world_size() == 1 else make_group_of_one()
    listed: list[Any] = [known.get(name, alone) for name in axes._fields]
    return DeviceMesh.from_group(listed, device_type, mesh=places, mesh_dim_names=axes._fields)
