"""Adds up gradients of parameters that compute with another part of the activations on each rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from dsjob.optim.shards import local
from dsjob.ranks.mesh import Ranks

Partial = Sequence[tuple[Collection[str], Ranks]]  # names of parameters, and the ranks that add up their gradients


@torch.no_grad()
def add_partial(masters: Mapping[str, nn.Parameter], partial: Partial, device: torch.device) -> None:
    """Replaces gradients of masters by their sums over ranks, which have the same parts of them. device: on which the
    ranks communicate. A collective of each group of ranks.

    A gradient that a rank lacks counts as zero. One that all ranks lack stays None.
    """
    for names, ranks in partial:
        groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for name, master in masters.items():
            if name in names:
                own = local(master.data)
                groups.setdefault((own.device, own.dtype), []).append(master)
        for (there, _), chosen in groups.items():
            _add_up(chosen, ranks, device, there)


def _add_up(masters: Sequence[nn.Parameter], ranks: Ranks, device: torch.device, there: torch.device) -> None:
    lacking = [master.grad is None for master in masters]
    for master in masters:
        if master.grad is None:
            master.grad = torch.zeros_like(master.data)
    gradients = [local(master.grad) for master in masters if master.grad is not None]
    used = torch.ones(len(masters), dtype=gradients[0].dtype, device=there)
    if any(lacking):  # else the host need not wait: neither here nor to read the flags
        used = (~torch.tensor(lacking)).to(used)
    # [elements of all gradients + one flag each]: a flag above 0 says that some rank has the gradient.
    flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), used]).to(device)
    dist.all_reduce(flat, group=ranks.group)
    *parts, flags = torch.split_with_sizes(flat.to(there), [*(g.numel() for g in gradients), len(gradients)])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
    for master, is_used in zip(masters, flags.tolist(), strict=True) if any(lacking) else ():
        if not is_used:
            master.grad = None
