"""Lamb: Adam's update, scaled for each parameter by the norm of its weights over that of the update."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsjob.optim.partwise import PartwiseOptimizer, move_averages
from dsjob.optim.shards import add_parts, local


class Lamb(PartwiseOptimizer):
    """You et al. 2019 in the form of DeepSpeed's FusedLamb (csrc/lamb/fused_lamb_cuda_kernel.cu, version 0.19).

    With m, v the running averages of the gradient and of its square, without correction, and w the weights:
    u = m / (sqrt(v) + eps) + weight_decay w, or sqrt(v + eps) for `eps_inside_sqrt`; w -= r c u, where
    c = |w| / |u| within [min_coeff, max_coeff] (1 where either norm is 0) and r = lr sqrt(1 - beta2^t) / (1 - beta1^t),
    or lr without `bias_correction`. Norms are those of whole parameters, however these are sharded.

    State of a parameter: `exp_avg` and `exp_avg_sq`, of its shape and dtype, and `step`, fp32 [].
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        updates = [self._direction(parameter, group) for parameter in parameters]
        ratios = self.find_ratios(parameters, updates, group)
        for parameter, update, ratio in zip(parameters, updates, ratios, strict=True):
            rate = group["lr"] * self._correction(parameter, group)
            local(parameter).sub_(update.mul_(ratio).mul_(rate))

    def find_ratios(self, parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> Tensor:
        """c of each parameter: fp32 [len(parameters)]."""
        sums = torch.stack(
            [
                torch.stack([_square(local(parameter)), _square(update)])
                for parameter, update in zip(parameters, updates, strict=True)
            ]
        )
        add_parts(sums, parameters)
        weights, lengths = sums.sqrt().unbind(1)
        ratios = (weights / lengths).clamp(group["min_coeff"], group["max_coeff"])
        return torch.where((weights == 0) | (lengths == 0), 1.0, ratios)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The own part of u, with the averages moved on."""
        average, square, _ = move_averages(self.state[parameter], parameter, group["betas"])
        return (average / self.root(square, group)).add_(local(parameter), alpha=group["weight_decay"])

    def root(self, square: Tensor, group: dict[str, Any]) -> Tensor:
        """The denominator of the update, for an average of squares."""
        return (square + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(group["eps"])

    def _correction(self, parameter: Tensor, group: dict[str, Any]) -> float:
        if not group["bias_correction"]:
            return 1.0
        (beta1, beta2), step = group["betas"], float(self.state[parameter]["step"])
        return math.sqrt(1 - beta2**step) / float(1 - beta1**step)


def _square(tensor: Tensor) -> Tensor:
    """The sum of squares, fp32 []."""
    return tensor.float().square().sum()
