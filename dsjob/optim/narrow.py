"""Steps optimizers whose parameters are kept in a lower precision than they are stepped in.

With bf16 masters, a step computes in fp32, some parameters at a time: weights, gradients and state become fp32, the
optimizer steps them, and the results are rounded once. Each operation of a step in bf16 would round instead, and lose
most of it: 0.999 times a bf16 number is that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsjob.optim.parts import split
from dsjob.optim.shards import local

PART = 64 << 20  # bytes of parameters that are fp32 at a time

_kept: WeakKeyDictionary[Optimizer, torch.dtype] = WeakKeyDictionary()


def keep_state_in(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Makes steps of `optimizer` compute in fp32, and keeps its state in `dtype` between them. Its parameters may have
    any dtype. It must update each element by itself."""
    _kept[optimizer] = dtype


def find_kept(optimizer: Optimizer | None) -> torch.dtype | None:
    """The dtype of the state of an optimizer that `keep_state_in` was called for."""
    return _kept.get(optimizer) if optimizer is not None else None


@torch.no_grad()
def step_in_fp32(optimizer: Optimizer, step: Callable[[Optimizer], object], dtype: torch.dtype) -> None:
    """Calls `step` over parts of the parameters, as fp32 tensors in their place. dtype: of the state afterwards."""
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    low = [p for p in listed if p.grad is not None and p.dtype in (torch.bfloat16, torch.float16)]
    gradients = {parameter: parameter.grad for parameter in low}
    for parameter in low:  # an optimizer skips parameters without a gradient
        parameter.grad = None
    try:
        # Other parameters step with the first part.
        for part in list(split(low, lambda parameter: 2 * local(parameter).nbytes, PART)) or [[]]:
            with _stand_ins(optimizer, {parameter: gradients[parameter] for parameter in part}, dtype):
                step(optimizer)
            for parameter in set(listed) - set(low):
                gradients.setdefault(parameter, parameter.grad)
                parameter.grad = None
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


@contextmanager
def _stand_ins(optimizer: Optimizer, gradients: dict[Tensor, Any], dtype: torch.dtype) -> Iterator[None]:
    """Puts fp32 tensors, of this rank's parts, in the place of parameters with gradients and state; takes what changed.

    Plain tensors, where the parameters are shards: each element is updated by itself.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for parameter, gradient in gradients.items():
        made[parameter] = nn.Parameter(local(parameter.detach()).float())
        made[parameter].grad = local(gradient).float()
        if state := optimizer.state.pop(parameter, None):
            optimizer.state[made[parameter]] = {key: _widen(value) for key, value in state.items()}
    before: list[Sequence[Tensor]] = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [made.get(parameter, parameter) for parameter in group["params"]]
    try:
        yield
        for parameter, wide in made.items():
            local(parameter.data).copy_(wide.data)
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
        for parameter, wide in made.items():
            if state := optimizer.state.pop(wide, None):
                optimizer.state[parameter] = {key: _narrow(value, parameter, dtype) for key, value in state.items()}


def _widen(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    own = local(value)
    return own.float() if own.dtype in (torch.bfloat16, torch.float16) else own


def _narrow(value: Any, parameter: Tensor, dtype: torch.dtype) -> Any:
    """A value of the state as it is kept between steps: in `dtype`, and sharded as `parameter`, if it has its shape."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.shape == local(parameter).shape):
        return value
    if value.dim() == 0:
        return value  # a count of steps, perhaps
    value = value.to(dtype)
    if not isinstance(parameter, DTensor):
        return value
    mesh, places = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, places, run_check=False, shape=parameter.shape, stride=parameter.stride())
