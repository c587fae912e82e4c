"""Adam without bias correction, as some of the first large-batch recipes have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsjob.optim.partwise import PartwiseOptimizer, move_averages, own_gradients
from dsjob.optim.shards import local


class UncorrectedAdam(PartwiseOptimizer):
    """Adam whose averages are not corrected for their start at zero: DeepSpeed's with `bias_correction: false`.

    The first steps are longer for it: with betas 0.9 and 0.999 the very first is 3.2 times as long. State of a
    parameter: `step` (fp32 []), `exp_avg` and `exp_avg_sq`, of its shape and dtype. `weight_decay` is decoupled in
    `adam_w_mode`, else added to the gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam_w_mode": adam_w_mode}
        super().__init__(params, defaults)

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        weights, gradients = [local(parameter) for parameter in parameters], own_gradients(parameters)
        if group["adam_w_mode"]:
            torch._foreach_mul_(weights, 1 - rate * decay)
        elif decay:
            torch._foreach_add_(gradients, weights, alpha=decay)
        states = [self.state[parameter] for parameter in parameters]
        averages, squares, _ = move_averages(states, parameters, group["betas"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(weights, averages, roots, value=-rate)
