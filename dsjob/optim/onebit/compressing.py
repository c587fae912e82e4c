"""The common base of the 1-bit optimizers, which reduce tensors themselves instead of leaving that to the engine.

`optim.onebit.signs` implements the compressed mean. `optim.onebit.own_gradients` is the interface to the rest of dsjob.
Each optimizer decides what it sends.

While such an optimizer `communicates`, DDP reduces nothing. This requires full parameters, so it only works at stage 0,
as in DeepSpeed. Each rank clips its own gradients by their own norm. State that differs between ranks (the errors) is
saved as [ranks, ...]; with another number of ranks it starts at zero, and a note says so.

Deliberate differences from DeepSpeed: the first call of `step` updates the parameters, `bias_correction` and
`eps_inside_sqrt` take effect, scales ignore padding, ZeroOneAdam keeps weight decay out of the momentum and makes ranks
bitwise identical after each exchange, and OneBitLamb unifies its scales within each parameter group.
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
    """An optimizer that takes each rank's own gradients while it `communicates`, and otherwise their mean.

    While it communicates, it steps every parameter that has ever had a gradient, and treats a missing gradient as zero,
    because ranks may differ in which parameters they used. An element whose average of squares is 0 at the freeze has
    never had a gradient. It does not move, since its share of a compressed momentum would be divided by eps alone. The
    same holds for elements where a group's `exp_avg_mask` is 0. The mask has the shape of the group's parameters, or is
    flat.
    """

    native = False  # whether the compiled op compresses, with the same result; see `dsjob.engine.native`
    _steps = 0  # taken so far; the same on all ranks, so all agree on when to communicate

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
        """`freeze`: the argument's name, and the number of steps before the average of squares freezes. `more`: further
        defaults of parameter groups. Raises ValueError if that number is below 1, UsageError for a mask of wrong size.
        """
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
        # Not super(): in OneBitLamb that would call Lamb.__init__, which sets other defaults.
        PartwiseOptimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's method. Raises UsageError if the size of a mask differs from that of a parameter."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _find_mask(parameter, self.param_groups[-1])

    @property
    def communicates(self) -> bool:
        """Whether the next step takes each rank's own gradients."""
        raise NotImplementedError

    @property
    def own_state(self) -> Sequence[str]:
        """Keys of the state that currently differs between ranks."""
        return ERRORS

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Takes one step. Returns the result of `closure`."""
        result = super().step(closure)
        self._steps += 1
        return result

    def choose(self, group: dict[str, Any]) -> list[Tensor]:
        """The parameters to step: those with a gradient, or while the optimizer communicates, those that ever had one.

        The latter are the same on all ranks, as collectives require.
        """
        if any(isinstance(parameter, DTensor) for parameter in group["params"]):
            raise TargetError(
                f"{type(self).__name__} does not support sharded parameters", hint="use zero_optimization.stage=0"
            )
        if not self.communicates:
            return super().choose(group)
        return [parameter for parameter in group["params"] if self.state.get(parameter) and parameter.numel()]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads `state_dict`. Masks are not loaded: the current ones stay."""
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        super().load_state_dict(dict(state_dict))
        for group, mask in zip(self.param_groups, masks, strict=True):
            # The checkpoint's group may contain a mask. The program's current one decides.
            group.pop("exp_avg_mask", None)
            if mask is not None:
                group["exp_avg_mask"] = mask
        # The count is not part of the state, but each parameter has its own.
        self._steps = max((int(entry["step"]) for entry in self.state.values()), default=0)

    def move_average(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Updates the momentum with this rank's gradient while the average of squares is frozen. Returns it."""
        state, average = self.state[parameter], self.state[parameter]["exp_avg"]
        # Bias correction of the frozen average of squares must use the number of its own updates.
        state.setdefault("variance_step", int(state["step"]))
        state["step"] += 1
        # A missing gradient counts as zero: the momentum still decays, on all ranks alike.
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        moved: Tensor = average.lerp_(gradient, 1 - group["betas"][0]).mul_(self.find_live(parameter, group))
        return moved

    def find_live(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The elements that ever had a gradient and are not masked: bool, in the parameter's shape."""
        live: Tensor = self.state[parameter]["exp_avg_sq"] > 0
        mask = _find_mask(parameter, group)
        return live if mask is None else live & mask.to(live.device).bool()

    def average(
        self, values: Sequence[Tensor], parameters: Sequence[Tensor], group: dict[str, Any], *, one_scale: bool = False
    ) -> Sequence[Tensor]:
        """Approximate means of `values` over all ranks; one tensor per parameter. See `average_signs`."""
        ranks = count_ranks()
        # On one rank nothing is sent, so nothing is rounded to signs.
        if ranks == 1:
            return values
        errors = []
        for parameter in parameters:
            state, width = self.state[parameter], chunk_width(parameter.numel(), ranks)
            # fp32. worker_error [ranks, width]: what this rank's signs have left out so far, for every rank's chunk.
            # server_error [width]: what the signs of the mean of this rank's own chunk have left out.
            if "worker_error" not in state:
                state["worker_error"] = torch.zeros(ranks, width, device=parameter.device)
                state["server_error"] = torch.zeros(width, device=parameter.device)
            errors.append((state["worker_error"], state["server_error"]))
        workers, servers = zip(*errors, strict=True)
        live = [self.find_live(parameter, group) for parameter in parameters]
        return average_signs(values, live, workers, servers, one_scale=one_scale, native=self.native)

    def correct(self, parameter: Tensor, group: dict[str, Any]) -> tuple[float, float]:
        """Adam's bias corrections, 1 - beta^steps, of the average and of the average of squares."""
        if not group["bias_correction"]:
            return 1.0, 1.0
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        return 1 - beta1 ** float(state["step"]), 1 - beta2 ** float(state.get("variance_step", state["step"]))

    def find_root(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The denominator of Adam's update, in the parameter's shape."""
        square, correction = self.state[parameter]["exp_avg_sq"], self.correct(parameter, group)[1]
        if group["eps_inside_sqrt"]:
            root: Tensor = (square / correction + group["eps"]).sqrt_()
        else:
            root = (square.sqrt() / correction**0.5).add_(group["eps"])
        return root

    def move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Adam's update of the parameter with decoupled weight decay; in the order of operations of torch's AdamW."""
        rate = group["lr"] / self.correct(parameter, group)[0]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(self.state[parameter]["exp_avg"], self.find_root(parameter, group), value=-rate)


def _find_mask(parameter: Tensor, group: Mapping[str, Any]) -> Tensor | None:
    """A group's mask in the shape of one of its parameters. Raises UsageError if the sizes differ."""
    mask: Tensor | None = group.get("exp_avg_mask")
    if mask is None or mask.shape == parameter.shape:
        return mask
    if mask.numel() != parameter.numel():
        found, wanted = list(mask.shape), list(parameter.shape)
        raise UsageError(
            f"exp_avg_mask has shape {found}, but a parameter of its group has shape {wanted}",
            hint="put parameters of different shapes into different groups",
        )
    return mask.reshape(parameter.shape)
