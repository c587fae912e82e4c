"""Optimizer steps taken part by part, so that something else can go on with the parts that are done.

An optimizer that updates each parameter by itself steps 64 MiB of masters at a time: new weights are cast on the host
and copied to the device while the next part steps, and only the device waits for the last copy. Other optimizers, and
those with hooks, step everything at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from dsjob.optim.lion import Lion

# A step of these moves each parameter that has a gradient by itself, and does nothing else.
_SEPARATE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
    Lion,
)


def can_step_in_parts(optimizer: Optimizer) -> bool:
    """Whether several steps over some parameters each are what one step over all is, to the program too."""
    kind = type(optimizer)
    own = kind.__module__.split(".")[0] in ("torch", "dsjob")  # a program's subclass may do more in `step`
    step = vars(optimizer).get("step")  # so may what it has put in its place; a schedule's wrapper only notes the call
    own = own and (step is None or getattr(step, "__wrapped__", None) is kind.step)
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return own and isinstance(optimizer, _SEPARATE) and not any(hooks)


def step_in_parts(optimizer: Optimizer, parts: Sequence[Sequence[Tensor]], done: Callable[[int], None]) -> None:
    """Steps `parts` of the parameters one after the other, the first with all parameters that are in none.

    Calls `done` with a part's number after its step. Gradients are dropped.
    """
    gradients = [[parameter.grad for parameter in part] for part in parts]
    for part in parts:
        for parameter in part:
            parameter.grad = None
    for number, part in enumerate(parts):
        for parameter, gradient in zip(part, gradients[number], strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        done(number)
