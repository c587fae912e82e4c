"""Lion: steps of one size, in the direction of the sign of an averaged gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsjob.optim.partwise import PartwiseOptimizer
from dsjob.optim.shards import local


class Lion(PartwiseOptimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", with the defaults of DeepSpeed's FusedLion.

    State of a parameter: `exp_avg`, of its shape and dtype. `weight_decay` is decoupled. An element without any
    gradient yet stays where it is; DeepSpeed's kernels move it by lr, since they know no sign of zero.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (fast, slow) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        weight, gradient, average = local(parameter), local(parameter.grad), local(state["exp_avg"])  # type: ignore[arg-type]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(average.lerp(gradient, 1 - fast).sign_(), alpha=group["lr"])
        average.lerp_(gradient, 1 - slow)
