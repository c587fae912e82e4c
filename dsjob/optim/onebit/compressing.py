"""What the 1-bit optimizers have in common: when they communicate by themselves, and what they keep for it.

How a mean travels as signs is the matter of `optim.onebit.signs`, what the rest of dsjob knows of that of
`optim.onebit.own_gradients`, what is sent that of each optimizer.

While such an optimizer `communicates`, DDP reduces nothing. That needs whole parameters: stage 0, as in DeepSpeed.
Each rank clips its own gradients by their own norm. What differs by rank (the errors) is saved as [ranks, ...]; on
another number of ranks it starts at zero, with a note. Deliberate differences from DeepSpeed: the first step is a
step, `bias_correction` and `eps_inside_sqrt` take effect, padding counts in no scale, ZeroOneAdam keeps weight decay
out of the momentum and leaves ranks identical to the last bit after each exchange, and OneBitLamb unites its scales
group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsjob.errors import TargetError, UsageError
from dsjob.optim.onebit.own_gradients import count_ranks
from dsjob.optim.onebit.signs import average_signs, chunk_width
from dsjob.optim.partwise import PartwiseOptimizer

ERRORS = ("worker_error", "server_error")


class CompressingOptimizer(PartwiseOptimizer):
    """An optimizer that is given each rank's own gradients while it `communicates`; the mean over all ranks else.

    While it communicates, it moves every parameter that has had a gradient before, one that has none now as if by
    zeros: whether a parameter was used may differ by rank. An element whose average of squares is 0 when this freezes
    has had no gradient; it stays where it is, since its share of a compressed momentum would be divided by eps alone.
    So does what a group's `exp_avg_mask`, a tensor of the shape of its parameters or flat, has zeros for.
    """

    _steps = 0  # taken so far

    def __init__(
        self,
        params: Any,
        freeze: tuple[str, int],
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        eps_inside_sqrt: bool,
        weight_decay: float,
        **more: Any,
    ) -> None:
        """`freeze`: the steps in which the average of squares moves, and what that argument is called. `more`: what
        parameter groups have besides. Raises ValueError for no such steps, UsageError for a mask of another size."""
        name, steps = freeze
        if steps < 1:
            raise ValueError(f"{name}: the average of squares needs at least one step")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            **more,
        }
        PartwiseOptimizer.__init__(self, params, defaults)  # a second base class would make defaults of its own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises UsageError for a mask of another size than a parameter."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _find_mask(parameter, self.param_groups[-1])

    @property
    def communicates(self) -> bool:
        """Whether the next step is given each rank's own gradients."""
        raise NotImplementedError

    @property
    def own_state(self) -> Sequence[str]:
        """Keys of state that differs by rank now."""
        return ERRORS

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step; what `closure` returns."""
        result = super().step(closure)
        self._steps += 1
        return result

    def choose(self, group: dict[str, Any]) -> list[Tensor]:
        """Those with a gradient; while the optimizer communicates, those that ever had one."""
        if any(isinstance(parameter, DTensor) for parameter in group["params"]):
            raise TargetError(f"{type(self).__name__} steps whole parameters", hint="use zero_optimization.stage=0")
        if not self.communicates:
            return super().choose(group)
        return [parameter for parameter in group["params"] if self.state.get(parameter) and parameter.numel()]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`; masks stay what they are."""
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        super().load_state_dict(dict(state_dict))
        for group, mask in zip(self.param_groups, masks, strict=True):
            group.pop("exp_avg_mask", None)
            if mask is not None:
                group["exp_avg_mask"] = mask
        self._steps = max((int(entry["step"]) for entry in self.state.values()), default=0)

    def move_average(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The average of the own gradients, moved on by a step in which the average of squares stays."""
        state, average = self.state[parameter], self.state[parameter]["exp_avg"]
        state.setdefault("variance_step", int(state["step"]))
        state["step"] += 1
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        moved: Tensor = average.lerp_(gradient, 1 - group["betas"][0]).mul_(self.find_live(parameter, group))
        return moved

    def find_live(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Which elements have had a gradient and are not masked: bool, of the parameter's shape."""
        live: Tensor = self.state[parameter]["exp_avg_sq"] > 0
        mask = _find_mask(parameter, group)
        return live if mask is None else live & mask.to(live.device).bool()

    def average(
        self, values: Sequence[Tensor], parameters: Sequence[Tensor], group: dict[str, Any], *, one_scale: bool = False
    ) -> Sequence[Tensor]:
        """About the means over all ranks of `values`, a tensor for each parameter: see `average_signs`."""
        ranks = count_ranks()
        if ranks == 1:
            return values
        errors = []
        for parameter in parameters:
            state, width = self.state[parameter], chunk_width(parameter.numel(), ranks)
            if "worker_error" not in state:
                state["worker_error"] = torch.zeros(ranks, width, device=parameter.device)
                state["server_error"] = torch.zeros(width, device=parameter.device)
            errors.append((state["worker_error"], state["server_error"]))
        workers, servers = zip(*errors, strict=True)
        live = [self.find_live(parameter, group) for parameter in parameters]
        return average_signs(values, live, workers, servers, one_scale=one_scale)

    def correct(self, parameter: Tensor, group: dict[str, Any]) -> tuple[float, float]:
        """1 - beta^steps for the average and for that of squares: what they fall short by for having begun at zero."""
        if not group["bias_correction"]:
            return 1.0, 1.0
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        return 1 - beta1 ** float(state["step"]), 1 - beta2 ** float(state.get("variance_step", state["step"]))

    def find_root(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The denominator of Adam's update."""
        square, correction = self.state[parameter]["exp_avg_sq"], self.correct(parameter, group)[1]
        if group["eps_inside_sqrt"]:
            root: Tensor = (square / correction + group["eps"]).sqrt_()
        else:
            root = (square.sqrt() / correction**0.5).add_(group["eps"])
        return root

    def move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Adam's step along the average, with decoupled weight decay; in the order of torch's AdamW."""
        rate = group["lr"] / self.correct(parameter, group)[0]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(self.state[parameter]["exp_avg"], self.find_root(parameter, group), value=-rate)


def _find_mask(parameter: Tensor, group: Mapping[str, Any]) -> Tensor | None:
    """A group's mask in the shape of one of its parameters. Raises UsageError where it has another size."""
    mask: Tensor | None = group.get("exp_avg_mask")
    if mask is None or mask.shape == parameter.shape:
        return mask
    if mask.numel() != parameter.numel():
        found, wanted = list(mask.shape), list(parameter.shape)
        raise UsageError(f"exp_avg_mask is {found}, and a parameter of its group {wanted}", hint="give each a group")
    return mask.reshape(parameter.shape)
