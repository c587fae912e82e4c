"""The base of dsjob's own optimizers: they update each rank's own parts of sharded parameters, group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsjob.optim.shards import local


class PartwiseOptimizer(Optimizer):
    """An optimizer whose subclasses implement the update of one parameter group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Takes one step for all chosen parameters. Returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = self.choose(group)
            if parameters:
                self.update_group(parameters, group)
        return loss

    def choose(self, group: dict[str, Any]) -> list[Tensor]:
        """The parameters of a group that this step updates: those with a gradient."""
        return [parameter for parameter in group["params"] if parameter.grad is not None]

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Updates `parameters` (the result of `choose`) with the options in `group`."""
        raise NotImplementedError


def move_averages(
    states: Sequence[dict[str, Any]], parameters: Sequence[Tensor], betas: tuple[float, float]
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Updates Adam's running averages of gradients and of their squares. Returns this rank's parts of both, and the
    step counts."""
    averages, squares, steps = begin_averages(states, parameters)
    # Grouped operations over all parameters: on a GPU, a kernel per parameter would cost more than its arithmetic.
    gradients = own_gradients(parameters)
    torch._foreach_lerp_(averages, gradients, 1 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - betas[1])
    return averages, squares, steps


def begin_averages(
    states: Sequence[dict[str, Any]], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Counts a step. Returns this rank's parts of Adam's averages as they are before it, and the step counts.

    Creates the state of a parameter on its first step: `exp_avg` and `exp_avg_sq` (its shape and dtype), and `step`
    (fp32, shape []).
    """
    for state, parameter in zip(states, parameters, strict=True):
        # zeros_like of a DTensor has the same placements, so each rank only has state for its own part.
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
    averages = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    return averages, squares, [float(state["step"]) for state in states]


def own_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """This rank's parts of the gradients. All parameters must have one."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
