"""The interface between the rest of dsjob and optimizers that reduce gradients themselves, such as the 1-bit ones.

Such an optimizer has two attributes. `communicates` says before each step whether it needs each rank's own gradients
instead of their mean; the engine then reduces nothing. `own_state` lists the keys of its state that differ between
ranks. Other optimizers have neither attribute.
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
    """Whether the next step takes each rank's own gradients instead of their mean."""
    return bool(getattr(optimizer, "communicates", False))


def list_own_state(optimizer: Optimizer | None) -> Collection[str]:
    """Keys of the optimizer's state that currently differ between ranks."""
    keys: Collection[str] = getattr(optimizer, "own_state", ())
    return keys


def unite_norms(optimizer: Optimizer | None, norm: Tensor, device: torch.device) -> Tensor:
    """Makes the gradient norm equal on all ranks. `norm`: fp32 [].

    Normally it already is. If each rank has its own gradients, returns the root mean square of all ranks' norms, so
    that all ranks notice an overflow on one of them; this is a collective on `device`.
    """
    if not wants_own_gradients(optimizer):
        return norm
    square = norm.to(device, torch.float64).square()  # in fp32 it would overflow
    if dist.is_initialized():
        dist.all_reduce(square.div_(count_ranks()))
    return square.sqrt().float()


def require_data_parallel(optimizer: Optimizer | None, world: World) -> None:
    """Raises UsageError for an optimizer that would also average over model-parallel ranks."""
    if world.model.size > 1 and hasattr(optimizer, "communicates"):
        raise UsageError(
            f"{type(optimizer).__name__} averages over all ranks, not only over the data-parallel ranks of an mpu",
            hint="use an optimizer that leaves communication to the engine, such as AdamW or Lamb",
        )


def count_ranks() -> int:
    """The size of the default process group, which such optimizers communicate in; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
