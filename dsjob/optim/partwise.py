"""What optimizers of our own have in common: steps taken on the own parts of sharded parameters, group by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsjob.optim.shards import local


class PartwiseOptimizer(Optimizer):
    """An optimizer that says how the parameters of a group are moved."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step for every parameter that is to move; what `closure` returns."""
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
        """The parameters of a group that this step moves: those with a gradient."""
        return [parameter for parameter in group["params"] if parameter.grad is not None]

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Moves `parameters`, those that `choose` gave, as `group` says."""
        raise NotImplementedError


def move_averages(state: dict[str, Any], parameter: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor, float]:
    """Adam's running averages of the gradient and of its square, moved on by a step: their own parts, and the step.

    `state` holds `exp_avg` and `exp_avg_sq`, of the parameter's shape and dtype, and `step`, fp32 [], from the first
    step on.
    """
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    gradient = local(parameter.grad)  # type: ignore[arg-type]
    average = local(state["exp_avg"]).lerp_(gradient, 1 - betas[0])
    square = local(state["exp_avg_sq"]).mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return average, square, float(state["step"])
