"""Steps parameters on the host with native kernels (`ops.cpu_optimizers`), in place of the optimizer's own arithmetic.

The optimizer stays what it is: its class, groups and state are those of torch, and a checkpoint does not show which
arithmetic was used. The kernels update what they can; then the optimizer's own `step` updates the rest, which may be
nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsjob.ops import cpu_optimizers as kernels
from dsjob.optim.adam import DeepSpeedAdam
from dsjob.optim.lamb import Lamb
from dsjob.optim.lion import Lion
from dsjob.optim.narrow import find_kept, step_in_fp32
from dsjob.optim.parts import is_plain, step_own_parts
from dsjob.optim.shards import local

WORTHWHILE = 10_000_000  # elements: a step over fewer takes milliseconds, which do not pay for compiling the kernels

# What to call with an optimizer, some of its parameters, their group, a factor of their gradients, and their copies.
Update = Callable[[Optimizer, Sequence[Tensor], dict[str, Any], float, Sequence[Tensor]], None]
Copies = Mapping[Tensor, Tensor]

# Those that `take_step` steps with kernels, and the factor of the gradients of the next step.
_factors: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()


def prefer_kernels(optimizer: Optimizer) -> None:
    """Makes `take_step` use the kernels, which must be loaded. `optimizer`: one that `can_step_on_host`."""
    _factors[optimizer] = 1.0


def prefers_kernels(optimizer: Optimizer | None) -> TypeGuard[Optimizer]:
    """Whether `prefer_kernels` was called for it."""
    return optimizer is not None and optimizer in _factors


def set_factor(optimizer: Optimizer, factor: float) -> None:
    """Makes `take_step` multiply gradients by `factor`, until this is called again. The kernels do so as they read
    gradients, which saves a pass over them. `optimizer`: one that `prefers_kernels`."""
    _factors[optimizer] = factor


def get_factor(optimizer: Optimizer) -> float:
    """What `set_factor` has set."""
    return _factors[optimizer]


def take_step(optimizer: Optimizer, copies: Copies = MappingProxyType({})) -> list[Tensor]:
    """Steps `optimizer`: with kernels, where `prefer_kernels` was called for it.

    copies: by parameter, contiguous bf16 or fp16 tensors on the host. Where kernels step a parameter, they also write
    its new weights there, which saves a pass over them. Returns these parameters.
    """
    kept = find_kept(optimizer)
    if kept is not None:
        step_in_fp32(optimizer, _take, kept)
        return []
    return _take(optimizer, copies)


def _take(optimizer: Optimizer, copies: Copies = MappingProxyType({})) -> list[Tensor]:
    factor = _factors.get(optimizer)
    if factor is not None and is_plain(optimizer):  # hooks may have been added since
        return _step_on_host(optimizer, factor, copies)
    _multiply(optimizer, 1.0 if factor is None else factor)
    step_own_parts(optimizer)
    return []


@torch.no_grad()
def _step_on_host(optimizer: Optimizer, factor: float, copies: Copies) -> list[Tensor]:
    kind: Any = type(optimizer)
    update = _find_update(kind)
    assert update is not None
    stepped: list[tuple[Tensor, Tensor | None]] = []
    for group in filter(_is_usual, optimizer.param_groups):
        own = [parameter for parameter in group["params"] if _is_ready(parameter)]
        copied = [parameter for parameter in own if parameter in copies]
        if copied:
            update(optimizer, copied, group, factor, [copies[parameter] for parameter in copied])
        if len(copied) < len(own):
            update(optimizer, [parameter for parameter in own if parameter not in copies], group, factor, ())
        stepped += [(parameter, parameter.grad) for parameter in own]
    # The optimizer skips parameters without a gradient. Its `step` is called even if there are no others, since
    # schedules count its calls.
    for parameter, _ in stepped:
        parameter.grad = None
    try:
        _multiply(optimizer, factor)
        step_own_parts(optimizer)
    finally:
        for parameter, gradient in stepped:
            parameter.grad = gradient
    return [parameter for parameter, _ in stepped if parameter in copies]


def can_step_on_host(optimizer: Optimizer) -> bool:
    """Whether the kernels compute what this optimizer computes, on parameters that are on the host."""
    kind: Any = type(optimizer)
    known = _find_update(kind) is not None
    return known and is_plain(optimizer) and any(map(_is_usual, optimizer.param_groups))


@cache
def _find_update(kind: Any) -> Update | None:
    """The update of a class in KERNELS, or of a subclass that only adds a constructor, such as DeepSpeed's names."""
    for base in kind.__mro__:
        if base in KERNELS:
            return KERNELS[base]
        if any(_overrides(base, name) for name in vars(base) if not name.startswith("__")):
            return None  # it may change the update
    return None


def _overrides(kind: type, name: str) -> bool:
    """Whether a class replaces what it inherits. torch wraps `step` in the class of the first object, for profiling."""
    return inspect.unwrap(vars(kind)[name]) is not inspect.unwrap(getattr(kind.__base__, name, None))  # type: ignore[arg-type]


@torch.no_grad()
def _multiply(optimizer: Optimizer, factor: float) -> None:
    """Multiplies all gradients in place."""
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)


def _is_ready(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or parameter.device.type != "cpu" or parameter.dtype != torch.float32:
        return False
    own = local(gradient)
    known = own.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and own.is_contiguous() and local(parameter).is_contiguous()


def _is_usual(group: dict[str, Any]) -> bool:
    """Whether a group uses none of torch's options that the kernels lack."""
    rare = any(group.get(option) for option in ("amsgrad", "maximize", "capturable", "differentiable"))
    return not (rare or isinstance(group["lr"], Tensor))


def _own(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's parts of the weights, and of their gradients."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [local(parameter) for parameter in parameters], gradients


def _count(states: Sequence[dict[str, Any]]) -> list[float]:
    """Adds one to the step counts (fp32 []), and returns them."""
    counts = [state["step"] for state in states]
    torch._foreach_add_(counts, 1)
    return [float(count) for count in counts]


def _averages(states: Sequence[dict[str, Any]], parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's parts of Adam's averages, which a parameter's first step creates as torch does."""
    for state, parameter in zip(states, parameters, strict=True):
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
    return [local(state["exp_avg"]) for state in states], [local(state["exp_avg_sq"]) for state in states]


def _step_adam(
    optimizer: Optimizer, parameters: Sequence[Tensor], group: dict[str, Any], factor: float, copies: Sequence[Tensor]
) -> None:
    states = [optimizer.state[parameter] for parameter in parameters]
    averages, squares = _averages(states, parameters)
    kernels.adam_(
        *_own(parameters),
        averages,
        squares,
        _count(states),
        rate=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        bias_correction=group.get("bias_correction", True),
        gradient_factor=factor,
        copies=copies,
    )


def _step_lion(
    optimizer: Optimizer, parameters: Sequence[Tensor], group: dict[str, Any], factor: float, copies: Sequence[Tensor]
) -> None:
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
    averages = [local(optimizer.state[parameter]["exp_avg"]) for parameter in parameters]
    options = {"rate": group["lr"], "betas": group["betas"], "decay": group["weight_decay"]}
    kernels.lion_(*_own(parameters), averages, **options, gradient_factor=factor, copies=copies)


def _step_adagrad(
    optimizer: Optimizer, parameters: Sequence[Tensor], group: dict[str, Any], factor: float, copies: Sequence[Tensor]
) -> None:
    states = [optimizer.state[parameter] for parameter in parameters]
    rates = [group["lr"] / (1 + (count - 1) * group["lr_decay"]) for count in _count(states)]
    sums = [local(state["sum"]) for state in states]
    options = {"eps": group["eps"], "decay": group["weight_decay"]}
    kernels.adagrad_(*_own(parameters), sums, rates, **options, gradient_factor=factor, copies=copies)


def _step_lamb(
    optimizer: Optimizer, parameters: Sequence[Tensor], group: dict[str, Any], factor: float, copies: Sequence[Tensor]
) -> None:
    assert isinstance(optimizer, Lamb)
    states = [optimizer.state[parameter] for parameter in parameters]
    averages, squares = _averages(states, parameters)
    _count(states)
    weights, gradients = _own(parameters)
    form = {"eps": group["eps"], "eps_inside_root": group["eps_inside_sqrt"], "decay": group["weight_decay"]}
    sums = kernels.lamb_average_(
        weights, gradients, averages, squares, betas=group["betas"], gradient_factor=factor, **form
    )
    rates = optimizer.find_rates(parameters, sums, group)
    kernels.lamb_apply_(weights, averages, squares, rates, copies=copies, **form)


KERNELS: dict[type[Optimizer], Update] = {
    torch.optim.Adam: _step_adam,
    torch.optim.AdamW: _step_adam,
    torch.optim.Adagrad: _step_adagrad,
    DeepSpeedAdam: _step_adam,
    Lion: _step_lion,
    Lamb: _step_lamb,
}
