"""Adds up gradients of parameters that compute with another part of the activations on each rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsjob.optim.shards import local
from dsjob.ranks.mesh import Ranks

Partial = Sequence[tuple[Collection[str], Ranks]]  # names of parameters, and the ranks that add up their gradients


@torch.no_grad()
def add_partial(masters: Mapping[str, nn.Parameter], partial: Partial, device: torch.device) -> None:
    """Replaces gradients of masters by their sums over ranks, which have the same parts of them. device: on which the
    ranks communicate. A collective of each group of ranks."""
    for names, ranks in partial:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for name, master in masters.items():
            if name in names and master.grad is not None:
                own = local(master.grad)
                groups.setdefault((own.device, own.dtype), []).append(own)
        for (there, _), gradients in groups.items():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(device)
            dist.all_reduce(flat, group=ranks.group)
            parts = torch.split_with_sizes(flat.to(there), [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
