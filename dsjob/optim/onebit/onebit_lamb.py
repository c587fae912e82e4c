"""OneBitLamb: Lamb that communicates its momentum as signs once its average of squares is frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsjob.optim.lamb import Lamb
from dsjob.optim.onebit.compressing import CompressingOptimizer


class OneBitLamb(CompressingOptimizer, Lamb):
    """Li et al. 2021 (arXiv 2104.06069), in the form of DeepSpeed's OnebitLamb (runtime/fp16/onebit/lamb.py, 0.19).

    The first `freeze_step` steps are Lamb steps. They also keep an average of each parameter's trust ratio c, with
    decay `coeff_beta`. After that:

    - The average of squares v is frozen, and the momenta are averaged as signs with a single scale. So that one scale
      fits all, each momentum is multiplied by s = (mean of the root mean squares of all momenta) / (its own root mean
      square), both taken at the freeze.
    - The trust ratio is the average of c times a factor f, the largest element of root(v) / root(v'). v' is an average
      of squares that is still updated, with the gradients implied by the change of the momentum. With weight decay, f
      is interpolated between itself and 1, weighted by the norm of the update without decay relative to the whole
      update.
    - f is clamped to [factor_min, factor_max], and to a relative change of `factor_threshold` per step.

    State per parameter: that of Lamb, and `coeff_average` (fp32 []); from the freeze step on `exp_avg_sq_fresh` (v'),
    `scaling` (s), `last_factor` (f) and `variance_step`; with several ranks also the errors of `optim.onebit.signs`.
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
                # Present only in a state from after the freeze, if the document has raised `freeze_step` since.
                for key in ("exp_avg_sq_fresh", "scaling", "last_factor", "variance_step"):
                    self.state[parameter].pop(key, None)
            super().update_group(parameters, group)
            return
        if any("scaling" not in self.state[parameter] for parameter in parameters):
            self._freeze(parameters)
        # `_move_frozen` derives the mean gradient from the change of the momentum.
        before = [self.state[parameter]["exp_avg"].clone() for parameter in parameters]
        scaled = [self.move_average(p, group).mul_(self.state[p]["scaling"]) for p in parameters]
        means = self.average(scaled, parameters, group, one_scale=True)
        for parameter, last, mean in zip(parameters, before, means, strict=True):
            self.state[parameter]["exp_avg"].copy_(mean).div_(self.state[parameter]["scaling"])
            self._move_frozen(parameter, last, group)

    def find_ratios(self, parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Lamb's trust ratios, which also update their average."""
        ratios = super().find_ratios(parameters, updates, group)
        # Lamb returns exactly 1 if the parameter or its update is zero: such a ratio says nothing, so skip it.
        for parameter, ratio in zip(parameters, ratios, strict=True):
            average = self.state[parameter].setdefault("coeff_average", torch.zeros_like(ratio))
            average.copy_(torch.where(ratio == 1, average, average.lerp(ratio, 1 - self.coeff_beta)))
        return ratios

    def _freeze(self, parameters: list[Tensor]) -> None:
        # fp32 [parameters]: the root mean square of each momentum. Equal on all ranks, since gradients were reduced so
        # far.
        sizes = torch.stack([self.state[p]["exp_avg"].square().mean().sqrt() for p in parameters])
        for parameter, size in zip(parameters, sizes, strict=True):
            state = self.state[parameter]
            state["scaling"] = torch.where(size > 0, sizes.mean() / size, 1.0)
            state["last_factor"] = torch.ones_like(size)
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _move_frozen(self, parameter: Tensor, last: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        # Solve m = beta1 * last + (1 - beta1) * g for g: the mean gradient that the exchanged momentum implies.
        implied = state["exp_avg"].sub(last, alpha=beta1).div_(1 - beta1)
        fresh = state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(implied, implied, value=1 - beta2)
        # A ratio of roots above 1 means that an element's gradients have become smaller since the freeze.
        root, live = self.root(state["exp_avg_sq"], group), self.find_live(parameter, group)
        factor = torch.where(live, root / self.root(fresh, group), 0.0).max()
        update = state["exp_avg"] / root
        if group["weight_decay"]:
            plain = update.norm()
            # Weight decay does not depend on the average of squares, so only the rest of the update needs the factor.
            update.add_(parameter, alpha=group["weight_decay"])
            share = (plain / update.norm()).nan_to_num(nan=1.0).clamp(max=1.0)
            factor = factor * share + 1 - share
        near = state["last_factor"]
        # First the absolute limits, then those relative to the last step.
        factor = factor.clamp(*self.factor_range)
        factor = factor.clamp(near * (1 - self.factor_threshold), near * (1 + self.factor_threshold))
        near.copy_(factor)
        rate = group["lr"] * self._correction(parameter, group)
        parameter.sub_(update.mul_(state["coeff_average"] * factor * rate))

    def _correction(self, parameter: Tensor, group: dict[str, Any]) -> float:
        first, second = self.correct(parameter, group)
        return float(second**0.5 / first)
