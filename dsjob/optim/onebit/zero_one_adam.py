"""ZeroOneAdam: Adam that updates its average of squares less and less often, and later also skips communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsjob.optim.onebit.compressing import ERRORS, CompressingOptimizer
from dsjob.optim.onebit.own_gradients import count_ranks
from dsjob.optim.partwise import move_averages


class ZeroOneAdam(CompressingOptimizer):
    """Lu et al. 2022 (arXiv 2202.06009), with the policies of DeepSpeed (runtime/fp16/onebit/zoadam.py, version 0.19).

    During the first `var_freeze_step` steps, the average of squares is updated every `variance_interval` steps, with
    normally reduced gradients; in the other steps, gradients are averaged as signs. After that, the average of squares
    is frozen, and each rank takes local steps. Every `local_interval` steps, the ranks exchange the sum of lr * m as
    signs. All ranks then take the mean of these sums as a single step from their last common weights (the anchor), and
    set the momentum m to that mean divided by the sum of the learning rates.

    Between two exchanges, weights and momenta differ between ranks; a checkpoint contains the weights of rank 0. State
    per parameter: `exp_avg`, `exp_avg_sq`, `step` (fp32 []), `variance_step`; with several ranks the errors of
    `optim.onebit.signs`; from `var_freeze_step` on `anchor`, and the sums since the last exchange:
    `momentum_accumulator`, `rates` and `decay`.
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
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
    ) -> None:
        freeze = ("var_freeze_step", var_freeze_step)
        super().__init__(params, freeze, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay)
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper

    @property
    def _frozen(self) -> bool:
        return self._steps >= self.var_freeze_step

    @property
    def communicates(self) -> bool:
        # The number of the next step; `_steps` counts those taken.
        step = self._steps + 1
        return self._frozen or step % variance_interval(step, self.var_update_scaler) != 0

    @property
    def own_state(self) -> Sequence[str]:
        # After `var_freeze_step` steps, ranks are still equal: the next step is the first local one.
        local = self._steps > self.var_freeze_step and count_ranks() > 1
        return (*ERRORS, "momentum_accumulator", "exp_avg") if local else ERRORS

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if self._frozen and count_ranks() > 1:
            self._step_locally(parameters, group)
            return
        if self._frozen:
            for parameter in parameters:
                self.move_average(parameter, group)
        elif self.communicates:
            self._average_gradients(parameters, group)
        else:
            states = [self.state[parameter] for parameter in parameters]
            # `variance_step` counts updates of the average of squares, which are rarer than steps. Bias correction
            # needs it.
            counts = [state.pop("variance_step", 0) for state in states]
            move_averages(states, parameters, group["betas"])
            for state, count in zip(states, counts, strict=True):
                state["variance_step"] = count + 1
        for parameter in parameters:
            self.move(parameter, group)

    def _average_gradients(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        # All ranks must send the same list of tensors, so a missing gradient counts as zero.
        own = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        for parameter, mean in zip(parameters, self.average(own, parameters, group), strict=True):
            self.state[parameter]["step"] += 1
            self.state[parameter]["exp_avg"].lerp_(mean, 1 - group["betas"][0])

    def _step_locally(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if "anchor" not in state:
                for key in ERRORS:  # errors of gradients do not fit the sums of momenta that are sent from here on
                    state.pop(key, None)
                state.update(anchor=parameter.clone(), momentum_accumulator=torch.zeros_like(parameter))
                state.update(rates=0.0, decay=0.0)
            average = self.move_average(parameter, group)
            rate = group["lr"] / self.correct(parameter, group)[0]
            state["momentum_accumulator"].add_(average, alpha=rate)
            state["rates"] += rate
            state["decay"] += group["lr"] * group["weight_decay"]
        # Depends only on the step, so all ranks exchange in the same one.
        interval = local_interval(self._steps - self.var_freeze_step, self.local_step_scaler, self.local_step_clipper)
        meets = (self._steps + 1) % interval == 0
        if meets:
            sums = [self.state[parameter]["momentum_accumulator"] for parameter in parameters]
            for own, mean in zip(sums, self.average(sums, parameters, group), strict=True):
                own.copy_(mean)
        for parameter in parameters:
            self._go_from_anchor(parameter, group)
            if meets:
                self._start_interval(parameter, group)

    def _go_from_anchor(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Sets the parameter to the anchor plus all updates since the last exchange, computed from their sums.

        Adding the updates one by one would round differently, so that ranks would not be identical after an exchange.
        """
        state = self.state[parameter]
        # anchor and momentum_accumulator: fp32, in the parameter's shape. The accumulator is the sum of rate x
        # momentum.
        parameter.copy_(state["anchor"] * (1 - state["decay"]))
        parameter.addcdiv_(state["momentum_accumulator"], self.find_root(parameter, group), value=-1)

    def _start_interval(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if state["rates"]:  # if all rates were 0, so is the sum, and the momentum cannot be derived from it
            scale = self.correct(parameter, group)[0] / state["rates"]
            state["exp_avg"].copy_(state["momentum_accumulator"] * scale)
        state["anchor"].copy_(parameter)
        state["momentum_accumulator"].zero_()
        state.update(rates=0.0, decay=0.0)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads `state_dict`, and restores the weights of this rank from the anchor and the sums since the last
        exchange. Without these sums (another number of ranks), the loaded weights become the new anchor.

        Load the weights first.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                # The checkpoint has the weights of rank 0, but each rank has its own sums.
                if state and "momentum_accumulator" in state:
                    self._go_from_anchor(parameter, group)
                elif state:
                    state.pop("anchor", None)
                    state.setdefault("exp_avg", torch.zeros_like(parameter))


def variance_interval(step: int, updates: int) -> int:
    """The number of steps between two updates of the average of squares, around step number `step`.

    It starts at 1 and doubles after every `updates` updates. Updates happen at steps that are multiples of it.
    """
    interval, last = 1, updates
    while step > last:
        interval *= 2
        last = (last // interval + updates) * interval
    return interval


def local_interval(frozen_steps: int, doubling: int, most: int) -> int:
    """The number of steps between two exchanges. It starts at 1 and doubles every `doubling` steps, up to `most`."""
    return int(min(most, 2 ** min(frozen_steps // doubling, 62)))
