"""Lion: every element moves by the same amount, in the direction of the sign of an averaged gradient.

Unlike in DeepSpeed, elements that never had a gradient do not move.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsjob.optim.partwise import PartwiseOptimizer, own_gradients
from dsjob.optim.shards import local


class Lion(PartwiseOptimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", with the defaults of DeepSpeed's FusedLion.

    State of a parameter: `exp_avg` (its shape and dtype). `weight_decay` is decoupled. An element that has not had a
    gradient yet does not move; DeepSpeed's kernels move it by lr, since they treat zero as having a sign.
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
        fast, slow = group["betas"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        weights, gradients = [local(parameter) for parameter in parameters], own_gradients(parameters)
        averages = [local(self.state[parameter]["exp_avg"]) for parameter in parameters]
        # Decay comes first, so it applies to the weights before the step.
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        # The direction gives the current gradient the weight 1 - fast; the average that is kept, below, gives it 1 -
        # slow.
        directions = torch._foreach_lerp(averages, gradients, 1 - fast)
        torch._foreach_sign_(directions)
        torch._foreach_sub_(weights, directions, alpha=group["lr"])
        torch._foreach_lerp_(averages, gradients, 1 - slow)
