"""All that the rest of dsjob knows of optimizers that communicate by themselves, as the 1-bit ones do.

Such an optimizer has two attributes. `communicates` says before each step whether it wants each rank's own gradients in
place of their mean; nothing is reduced for it then. `own_state` lists the keys of its state that differ by rank. Other
optimizers have neither.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dsjob.errors import UsageError
from dsjob.ranks.mesh import World


def wants_own_gradients(optimizer: Optimizer | None) -> bool:
    """Whether the next step takes each rank's own gradients."""
    return bool(getattr(optimizer, "communicates", False))


def list_own_state(optimizer: Optimizer | None) -> Collection[str]:
    """Keys of the optimizer's state that differ by rank now."""
    keys: Collection[str] = getattr(optimizer, "own_state", ())
    return keys


def unite_norms(optimizer: Optimizer | None, norm: Tensor, device: torch.device) -> Tensor:
    """The same norm on every rank: `norm` itself, or the root mean square of all ranks' where each has its own.

    So all ranks know of an overflow on one of them. `norm`: fp32 []. A collective on `device` in the second case.
    """
    if not wants_own_gradients(optimizer):
        return norm
    square = norm.to(device, torch.float64).square()  # in fp32 it would overflow
    if dist.is_initialized():
        dist.all_reduce(square.div_(count_ranks()))
    return square.sqrt().float()


def require_data_parallel(optimizer: Optimizer | None, world: World) -> None:
    """Raises UsageError for an optimizer that would average over the parts of a model as well."""
    if world.model.size > 1 and hasattr(optimizer, "communicates"):
        raise UsageError(
            f"{type(optimizer).__name__} averages over all ranks, not over those that an mpu calls data-parallel",
            hint="take an optimizer that does not communicate by itself",
        )


def count_ranks() -> int:
    """Ranks of the default process group, over which such optimizers communicate; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
