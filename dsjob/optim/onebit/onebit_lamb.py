"""OneBitLamb: Lamb whose momentum travels as signs once its average of squares is frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsjob.optim.lamb import Lamb
from dsjob.optim.onebit.compressing import CompressingOptimizer


class OneBitLamb(CompressingOptimizer, Lamb):
    """Li et al. 2021 (arXiv 2104.06069), in the form of DeepSpeed's OnebitLamb (runtime/fp16/onebit/lamb.py, 0.19).

    The first `freeze_step` steps are Lamb's; an average of each parameter's c, with decay `coeff_beta`, is kept. From
    then on the average of squares v stays, and the mean of the momenta travels as signs, all with one scale: each is
    multiplied for that by s = (mean of all momenta's root mean squares) / its own, as they were at the freeze.
    c is then its average times f, the largest element of root(v) / root(v'), where v' is an average of squares that
    goes on with the gradients that the momentum's change implies; with weight decay the mean of f and 1 that the
    share of the update without decay says. f is within [factor_min, factor_max], and within `factor_threshold` of
    what it was a step before, relative to that.

    State of a parameter: Lamb's, and `coeff_average`, fp32 []; from the freeze step on `exp_avg_sq_fresh` (v'),
    `scaling` (s), `last_factor` (f) and `variance_step`, and on several ranks the errors of `optim.onebit.signs`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        freeze, bounds = ("freeze_step", freeze_step), {"max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, freeze, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, **bounds)
        self.freeze_step, self.coeff_beta = freeze_step, coeff_beta
        self.factor_range, self.factor_threshold = (factor_min, factor_max), factor_threshold

    @property
    def communicates(self) -> bool:
        return self._steps >= self.freeze_step

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not self.communicates:
            for parameter in parameters:
                for key in ("exp_avg_sq_fresh", "scaling", "last_factor", "variance_step"):
                    self.state[parameter].pop(key, None)
            super().update_group(parameters, group)
            return
        if any("scaling" not in self.state[parameter] for parameter in parameters):
            self._freeze(parameters)
        before = [self.state[parameter]["exp_avg"].clone() for parameter in parameters]
        scaled = [self.move_average(p, group).mul_(self.state[p]["scaling"]) for p in parameters]
        means = self.average(scaled, parameters, group, one_scale=True)
        for parameter, last, mean in zip(parameters, before, means, strict=True):
            self.state[parameter]["exp_avg"].copy_(mean).div_(self.state[parameter]["scaling"])
            self._move_frozen(parameter, last, group)

    def find_ratios(self, parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Lamb's, of which the average is kept; a ratio of 1 says that there was nothing to compare."""
        ratios = super().find_ratios(parameters, updates, group)
        for parameter, ratio in zip(parameters, ratios, strict=True):
            average = self.state[parameter].setdefault("coeff_average", torch.zeros_like(ratio))
            average.copy_(torch.where(ratio == 1, average, average.lerp(ratio, 1 - self.coeff_beta)))
        return ratios

    def _freeze(self, parameters: list[Tensor]) -> None:
        sizes = torch.stack([self.state[p]["exp_avg"].square().mean().sqrt() for p in parameters])
        for parameter, size in zip(parameters, sizes, strict=True):
            state = self.state[parameter]
            state["scaling"] = torch.where(size > 0, sizes.mean() / size, 1.0)
            state["last_factor"] = torch.ones_like(size)
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _move_frozen(self, parameter: Tensor, last: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        implied = state["exp_avg"].sub(last, alpha=beta1).div_(1 - beta1)
        fresh = state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(implied, implied, value=1 - beta2)
        root, live = self.root(state["exp_avg_sq"], group), self.find_live(parameter, group)
        factor = torch.where(live, root / self.root(fresh, group), 0.0).max()
        update = state["exp_avg"] / root
        if group["weight_decay"]:
            plain = update.norm()
            update.add_(parameter, alpha=group["weight_decay"])
            share = (plain / update.norm()).nan_to_num(nan=1.0).clamp(max=1.0)
            factor = factor * share + 1 - share
        near = state["last_factor"]
        factor = factor.clamp(*self.factor_range)
        factor = factor.clamp(near * (1 - self.factor_threshold), near * (1 + self.factor_threshold))
        near.copy_(factor)
        rate = group["lr"] * self._correction(parameter, group)
        parameter.sub_(update.mul_(state["coeff_average"] * factor * rate))

    def _correction(self, parameter: Tensor, group: dict[str, Any]) -> float:
        first, second = self.correct(parameter, group)
        return float(second**0.5 / first)
