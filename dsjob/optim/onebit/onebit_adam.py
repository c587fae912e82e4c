"""OneBitAdam: Adam that communicates its momentum as signs once its average of squares is frozen."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsjob.optim.onebit.compressing import CompressingOptimizer
from dsjob.optim.partwise import move_averages


class OneBitAdam(CompressingOptimizer):
    """Tang et al. 2021 (arXiv 2102.02888), with DeepSpeed's arguments (runtime/fp16/onebit/adam.py, version 0.19).

    The first `freeze_step` steps are AdamW steps with normally reduced gradients. After that, the average of squares is
    frozen, each rank updates the momentum with its own gradient, and the momenta are averaged as signs.

    State per parameter: `exp_avg`, `exp_avg_sq`, `step` (fp32 []); from the freeze step on also `variance_step`, and
    with several ranks `worker_error` and `server_error` of `optim.onebit.signs`.
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
    ) -> None:
        freeze = ("freeze_step", freeze_step)
        super().__init__(params, freeze, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay)
        self.freeze_step = freeze_step

    @property
    def communicates(self) -> bool:
        return self._steps >= self.freeze_step

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if self.communicates:
            # `own` are the state's tensors, moved by this rank's gradient. The mean replaces them, so ranks agree
            # again.
            own = [self.move_average(parameter, group) for parameter in parameters]
            for average, mean in zip(own, self.average(own, parameters, group), strict=True):
                average.copy_(mean)
        else:
            for parameter in parameters:
                # Present only in a state from after the freeze, if the document has raised `freeze_step` since.
                self.state[parameter].pop("variance_step", None)
            move_averages([self.state[parameter] for parameter in parameters], parameters, group["betas"])
        for parameter in parameters:
            self.move(parameter, group)
