"""What an optimizer needs to know of sharded parameters: the own part of a tensor, and sums over all of its parts.

An update that looks at each element alone is taken on the own parts; what looks at a whole parameter comes here.

Lamb adds up the norms of all parameters in one collective. Muon gathers each matrix, works on it on every rank and
keeps its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_parts(sums: Tensor, parameters: Sequence[Tensor]) -> None:
    """Makes sums over the own parts into sums over whole parameters, in place.

    `sums`: [len(parameters), n], row by row what was summed up over the own part of each parameter. One collective for
    all parameters that are spread over the same ranks; all ranks have to call it with the same parameters.
    """
    spread: dict[tuple[dist.ProcessGroup, str], list[int]] = {}
    for row, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    mesh = parameter.device_mesh
                    spread.setdefault((mesh.get_group(dim), mesh.device_type), []).append(row)
    for (group, device), rows in spread.items():
        if len(rows) == len(parameters) and sums.device.type == device:
            dist.all_reduce(sums, group=group)
            continue
        index = torch.tensor(rows, device=sums.device)
        part = sums[index].to(device)
        dist.all_reduce(part, group=group)
        sums[index] = part.to(sums.device)


def on_mesh(tensor: DTensor) -> DTensor:
    """`tensor` on the device by which its ranks communicate: parts of it may be on the host."""
    device = tensor.device_mesh.device_type
    return tensor if tensor.device.type == device else cast(DTensor, tensor.to(device))


def gather(tensor: Tensor) -> Tensor:
    """All of `tensor` on every rank that has a part of it, where these ranks communicate; a plain tensor as it is."""
    return on_mesh(tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor` on every rank that has a part of it, where that part is."""
    return gather(tensor).to(tensor.device)


def own_part(value: Tensor, like: Tensor) -> Tensor:
    """The part of `value`, which is whole, that this rank holds of `like`, and where it holds it."""
    if not isinstance(like, DTensor):
        return value
    placed = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local().to(like.device)
