"""Lamb: Adam's update, scaled for each parameter by the ratio of its weights' norm to the update's norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dsjob.ops import lamb as kernels
from dsjob.optim.partwise import PartwiseOptimizer, begin_averages, move_averages, own_gradients
from dsjob.optim.shards import add_parts, local


class Lamb(PartwiseOptimizer):
    """You et al. 2019 in the form of DeepSpeed's FusedLamb (csrc/lamb/fused_lamb_cuda_kernel.cu, version 0.19).

    m and v are the running averages of the gradient and of its square, without correction; w are the weights:

    - u = m / (sqrt(v) + eps) + weight_decay w; with `eps_inside_sqrt`, the divisor is sqrt(v + eps)
    - w -= r c u
    - c = |w| / |u|, clamped to [min_coeff, max_coeff]; 1 if either norm is 0
    - r = lr sqrt(1 - beta2^t) / (1 - beta1^t); r = lr without `bias_correction`

    Norms are those of whole parameters, even if they are sharded. State of a parameter: `exp_avg` and `exp_avg_sq` (its
    shape and dtype), and `step` (fp32, shape []).
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

    native = False  # whether to step parameters on a GPU with `ops.lamb`, which must be loaded

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if self.native and all(map(_is_ready, parameters)):
            self._update_at_once(parameters, group)
            return
        weights = [local(parameter) for parameter in parameters]
        averages, squares, _ = move_averages([self.state[p] for p in parameters], parameters, group["betas"])
        updates = list(torch._foreach_div(averages, self._roots(squares, group)))
        # Weight decay belongs to the update, so add it before measuring the update's norm.
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        ratios = self.find_ratios(parameters, updates, group)  # a collective if parameters are sharded
        rates = [group["lr"] * self._correction(parameter, group) for parameter in parameters]
        torch._foreach_mul_(updates, [ratio.to(u.device) for ratio, u in zip(ratios, updates, strict=True)])
        torch._foreach_mul_(updates, rates)
        torch._foreach_sub_(weights, updates)

    def _update_at_once(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """The same, with kernels: nothing waits for the GPU."""
        weights = [local(parameter) for parameter in parameters]
        averages, squares, _ = begin_averages([self.state[p] for p in parameters], parameters)
        form = {"eps": group["eps"], "eps_inside_root": group["eps_inside_sqrt"], "decay": group["weight_decay"]}
        sums = kernels.average_(weights, own_gradients(parameters), averages, squares, betas=group["betas"], **form)
        ratios = self._ratios_of(sums, parameters, group)
        rates = [group["lr"] * self._correction(parameter, group) for parameter in parameters]
        kernels.apply_(weights, averages, squares, ratios, rates, **form)

    def find_ratios(self, parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> Tensor:
        """The ratio c of each parameter: fp32 [len(parameters)]."""
        first = updates[0].device  # with offloading, some are on the host and some on the GPU
        # [weights of p0, update of p0, weights of p1, ...], each fp32 [].
        squares = [
            _square(tensor).to(first) for pair in zip(map(local, parameters), updates, strict=True) for tensor in pair
        ]
        return self._ratios_of(torch.stack(squares).view(-1, 2), parameters, group)

    def find_rates(self, parameters: Sequence[Tensor], squares: Tensor, group: dict[str, Any]) -> list[float]:
        """The factor r c of each parameter's update.

        squares: [parameters, 2], the sums of squares of the weights and of the updates, over this rank's parts.
        """
        ratios = self._ratios_of(squares, parameters, group).tolist()
        rate: float = group["lr"]
        return [rate * self._correction(p, group) * ratio for p, ratio in zip(parameters, ratios, strict=True)]

    def _ratios_of(self, squares: Tensor, parameters: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
        """The ratio c of each parameter: [parameters]. squares: as for `find_rates`; changed in place."""
        # Add squares, not norms: the norm of a whole parameter is the root of the sum over its parts.
        add_parts(squares, parameters)
        weights, lengths = squares.sqrt().unbind(1)
        ratios = (weights / lengths).clamp(group["min_coeff"], group["max_coeff"])
        # Without this, a parameter of zeros (a fresh bias) would move by min_coeff only, and 0 / 0 would be nan.
        return torch.where((weights == 0) | (lengths == 0), 1.0, ratios)

    def _roots(self, squares: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """`root` for several tensors at once."""
        if group["eps_inside_sqrt"]:
            return list(torch._foreach_sqrt(torch._foreach_add(squares, group["eps"])))
        roots = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(roots, group["eps"])
        return roots

    def root(self, square: Tensor, group: dict[str, Any]) -> Tensor:
        """The divisor of the update, given the average of squares."""
        return (square + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(group["eps"])

    def _correction(self, parameter: Tensor, group: dict[str, Any]) -> float:
        if not group["bias_correction"]:
            return 1.0
        (beta1, beta2), step = group["betas"], float(self.state[parameter]["step"])
        return math.sqrt(1 - beta2**step) / float(1 - beta1**step)


def _is_ready(parameter: Tensor) -> bool:
    """Whether the kernels take a parameter, which has a gradient."""
    tensors = [local(parameter), local(cast(Tensor, parameter.grad))]
    return all(each.is_cuda and each.dtype == torch.float32 and each.is_contiguous() for each in tensors)


def _square(tensor: Tensor) -> Tensor:
    """The sum of squares: fp32, shape []."""
    return tensor.float().square().sum()
