"""Moves an engine's state to the host while something else needs the device, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsjob.errors import UsageError
from dsjob.optim.shards import local
from dsjob.parallel import Strategy

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")  # DeepSpeed's names


def offload(
    strategy: Strategy,
    optimizer: Optimizer | None,
    include: Collection[Any] | None = None,
    device: Any = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Moves optimizer state, and parameters with their masters and gradients, to the host.

    include: which of `STATES` to move, as strings or enum members; by default all. Parameters, masters and gradients
    move together, because torch requires a gradient to be on the device of its parameter; gradients alone do not move.
    pin_memory: use pinned memory, if the device is a GPU. non_blocking: copies do not wait for each other. Raises
    UsageError for other names and devices.
    """
    if str(getattr(device, "value", device)) != "cpu":
        raise UsageError(f"cannot offload states to {device!r}", hint='use device="cpu"')
    names = {str(name.value if isinstance(name, Enum) else name) for name in include or STATES}
    unknown = sorted(names - set(STATES))
    if unknown:
        raise UsageError(f"unknown state to offload: {unknown[0]!r}", hint=f"use one of {', '.join(STATES)}")
    pins = pin_memory and torch.cuda.is_available()

    def to_host(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor  # perhaps on a disk, which need not go back to memory
        moved = tensor.to("cpu", non_blocking=non_blocking)
        return moved.pin_memory() if pins and not isinstance(moved, DTensor) and not moved.is_pinned() else moved

    if "optim_states" in names and optimizer is not None:
        _move_optimizer(optimizer, lambda tensor, _: to_host(tensor))
    if names & {"hp_params", "lp_params"}:
        strategy.move_weights(to_host)
    if non_blocking and torch.cuda.is_available():
        torch.cuda.synchronize()  # wait once for all copies, before anything reads or saves them


def reload(
    strategy: Strategy, optimizer: Optimizer | None, device: torch.device, *, non_blocking: bool = False
) -> None:
    """Moves the state back to `device`. What the config offloads stays on the host."""

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    # Weights first: optimizer state goes to the device of its parameter.
    strategy.move_weights(to_device)
    if optimizer is not None:
        _move_optimizer(optimizer, lambda tensor, of: tensor.to(local(of).device, non_blocking=non_blocking))


def _move_optimizer(optimizer: Optimizer, move: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replaces each tensor of the state by `move(tensor, its parameter)`."""
    for parameter, entry in optimizer.state.items():
        # `step` stays where the optimizer put it: most of torch's optimizers keep it on the host.
        entry.update({k: move(v, parameter) for k, v in entry.items() if isinstance(v, Tensor) and k != "step"})
