"""Adam with optional bias correction. Some early large-batch recipes train without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsjob.optim.partwise import move_averages, own_gradients
from dsjob.optim.shards import local
from dsjob.torch_private import init_group


class DeepSpeedAdam(torch.optim.Adam):
    """torch's Adam, with a key `bias_correction` per group: whether to correct the averages for their start at zero.

    Without it, the first steps are larger: with betas 0.9 and 0.999, the first step is 3.2 times as large. The state of
    a parameter is the same as in torch: `step` (fp32, shape []), `exp_avg` and `exp_avg_sq` (its shape and dtype).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        """`adam_w_mode`: decouple weight decay; otherwise it is added to the gradient."""
        if amsgrad and not bias_correction:
            raise ValueError("amsgrad cannot be combined with bias_correction: false")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Collects the tensors that torch's step updates. Updates a group without bias correction itself, and then
        collects nothing."""
        if group.get("bias_correction", True):  # old checkpoints do not have this key
            return init_group(self, group, *lists)
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        # torch's step updates what this method adds to `lists`. Adding nothing leaves the group to `_move_uncorrected`.
        if parameters:
            self._move_uncorrected(parameters, group)
        return False

    def _move_uncorrected(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        weights, gradients = [local(parameter) for parameter in parameters], own_gradients(parameters)
        if group["decoupled_weight_decay"]:
            # Decoupled decay shrinks the weights directly; otherwise decay enters the averages as part of the gradient.
            torch._foreach_mul_(weights, 1 - rate * decay)
        elif decay:
            torch._foreach_add_(gradients, weights, alpha=decay)
        states = [self.state[parameter] for parameter in parameters]
        averages, squares, _ = move_averages(states, parameters, group["betas"])
        # A new list: `squares` is state, and must not become its own root.
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(weights, averages, roots, value=-rate)
