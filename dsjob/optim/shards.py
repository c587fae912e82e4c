"""Helps optimizers with sharded parameters: a rank's own part of a tensor, sums over all parts, whole tensors.

Elementwise updates work on each rank's own part. Updates that depend on a whole parameter need the functions here: Lamb
adds up the norms of all parameters in one collective; Muon gathers each matrix, computes its update on every rank, and
keeps its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dsjob.ranks.splits import Split, communicates_on, find_split


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, sharing its memory. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_parts(sums: Tensor, parameters: Sequence[Tensor]) -> None:
    """Turns sums over this rank's parts into sums over whole parameters, in place. With tensor parallelism, a parameter
    itself must be given, or its master, not its gradient: they know how they are divided.

    sums: [len(parameters), n]; each row has the sums over the own part of one parameter. One collective for all
    parameters that are sharded over the same ranks. All ranks must call it with the same parameters.
    """
    # (process group, device type) -> rows of the parameters that are spread over that group.
    spread: dict[tuple[dist.ProcessGroup, str], list[int]] = {}
    for row, parameter in enumerate(parameters):
        split = find_split(parameter)
        if split is not None and split.ranks.group is not None:
            spread.setdefault((split.ranks.group, communicates_on(split.ranks)), []).append(row)
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    mesh = parameter.device_mesh
                    spread.setdefault((mesh.get_group(dim), mesh.device_type), []).append(row)
    for (group, device), rows in spread.items():
        if len(rows) == len(parameters) and sums.device.type == device:
            dist.all_reduce(sums, group=group)
            continue
        # Only some rows are spread over this group, or `sums` is on the host while the group communicates on GPUs.
        index = torch.tensor(rows, device=sums.device)
        part = sums[index].to(device)
        dist.all_reduce(part, group=group)
        sums[index] = part.to(sums.device)


def on_mesh(tensor: DTensor) -> DTensor:
    """`tensor` on the device of its mesh, where ranks can communicate. With offloading, its parts are on the host."""
    device = tensor.device_mesh.device_type
    return tensor if tensor.device.type == device else cast(DTensor, tensor.to(device))


def gather(tensor: Tensor) -> Tensor:
    """The whole `tensor` on every rank of its mesh, on the mesh's device. A plain tensor is returned unchanged."""
    return on_mesh(tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, split: Split | None = None) -> Tensor:
    """The whole `tensor` on every rank of its mesh, and of `split` if given, on the device of the rank's part."""
    value = gather(tensor)
    return (value if split is None else split.gather(value)).to(tensor.device)


def own_part(value: Tensor, like: Tensor, split: Split | None = None) -> Tensor:
    """This rank's part of a whole tensor `value`, divided by `split` if given, and sharded like `like`, on the device
    of `like`."""
    value = value if split is None else split.take(value)
    if not isinstance(like, DTensor):
        return value
    # src_data_rank=None: every rank has the whole value, so DTensor only slices it, without communication.
    placed = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local().to(like.device)
