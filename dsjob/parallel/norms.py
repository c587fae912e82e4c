"""The norm and the scaling of gradients that may be sharded over ranks, and may be on the host or the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from dsjob.optim.shards import add_parts, local


def total_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The L2 norm of gradients, over all ranks that have shards of them: fp32, shape []; 0 if there are none.

    It is on the device of the gradients; on `device` if some are on the host and some are not.
    """
    places: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for gradient in gradients:
        whole = not isinstance(gradient, DTensor) or all(p.is_replicate() for p in gradient.placements)
        # Apart, because the squares of shards must be added over ranks, and those of whole gradients must not.
        places.setdefault((gradient.device, whole), []).append(gradient)
    norms = [_norm_in_one_place(group) for group in places.values()]
    if len(norms) > 1:
        norms = [torch.stack([norm.to(device, non_blocking=True) for norm in norms]).norm()]
    return norms[0] if norms else torch.zeros(())


def _norm_in_one_place(gradients: Sequence[Tensor]) -> Tensor:
    place = gradients[0].device
    devices = {gradient.device_mesh.device_type for gradient in gradients if isinstance(gradient, DTensor)}
    meshes = {(g.device_mesh, g.placements) if isinstance(g, DTensor) else None for g in gradients}
    if len(meshes) == 1 and devices == {"cpu"} == {place.type}:
        (mesh, placements), *_ = filter(None, meshes)
        if mesh.ndim == 1 and placements[0].is_shard():
            return _norm_of_shards(gradients, mesh.get_group())
    low = any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in gradients)
    if low and not devices:
        return cast(Tensor, torch.linalg.vector_norm(torch.stack(_norms(gradients))))
    if devices <= {place.type} and not low:
        norm = get_total_norm(gradients, norm_type=2.0)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # Shards on the host, of a mesh of GPUs. DTensor would reduce them on the host, where NCCL cannot communicate.
    # fp32 [gradients]: of this rank's parts.
    squares = torch.stack(_norms(gradients)).float().square()
    sums = squares[:, None].to(devices.pop())
    add_parts(sums, gradients)
    return sums.sum().sqrt().to(place)


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Of this rank's parts; fp32 at least."""
    own = [local(gradient) for gradient in gradients]
    low = any(part.dtype in (torch.bfloat16, torch.float16) for part in own)
    return list(torch._foreach_norm(own, 2, torch.float32) if low else torch._foreach_norm(own))


@torch.no_grad()
def _norm_of_shards(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """What `get_total_norm` computes for DTensors, in the same order, on plain tensors: DTensor's dispatch would take
    longer on the host than the arithmetic."""
    # [gradients]: the squares of this rank's parts, then of whole gradients.
    squares = torch.stack(_norms(gradients)).square()
    dist.all_reduce(squares, group=group)
    norm: Tensor = torch.linalg.vector_norm(squares.sqrt())
    return norm


def divide(gradients: list[Tensor], divisor: Tensor) -> None:
    """Divides gradients in place by a scalar tensor, which may be on another device."""
    for (device, dtype), owns in _group(gradients).items():
        torch._foreach_div_(owns, divisor.to(device, dtype))


def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiplies gradients in place by a scalar tensor, as torch's `clip_grads_with_norm_` does."""
    for (device, _), owns in _group(gradients).items():
        torch._foreach_mul_(owns, factor.to(device))


def _group(gradients: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """This rank's parts of gradients, by device and dtype. Operations on DTensors would cost more time on the host."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for own in map(local, gradients):
        groups.setdefault((own.device, own.dtype), []).append(own)
    return groups
