"""`deepspeed.ops.adam`: Adam with DeepSpeed's arguments and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import MethodType
from typing import Any

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.optim.adam import DeepSpeedAdam
from dsjob.optim.narrow import step_in_fp32

_LOW = (torch.bfloat16, torch.float16)


class _Adam(type):
    """Makes torch's Adam an instance: a config with type Adam or AdamW creates torch's optimizer.

    It is a FusedAdam anywhere, and a DeepSpeedCPUAdam where it steps parameters on the host.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        if cls.__name__ == "FusedAdam":
            return isinstance(instance, torch.optim.Adam)
        if cls.__name__ == "DeepSpeedCPUAdam" and isinstance(instance, torch.optim.Adam):
            return all(p.device.type == "cpu" for group in instance.param_groups for p in group["params"])
        return super().__instancecheck__(instance)


class FusedAdam(DeepSpeedAdam, metaclass=_Adam):
    """Adam, by default with decoupled weight decay (`adam_w_mode`). `weight_decay` is 0 by default."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad)


class DeepSpeedCPUAdam(FusedAdam):
    """The same optimizer, under the name that DeepSpeed uses for state on the host.

    fp32_optimizer_states: whether the state of bf16 and fp16 parameters is fp32. Their steps compute in fp32.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
        low = [p.dtype for group in self.param_groups for p in group["params"] if p.dtype in _LOW]
        if low:
            # In this instance alone: kernels step others, whose class has torch's own `step`.
            wide = _make_wide(torch.float32 if fp32_optimizer_states else low[0])
            self.step = MethodType(wide, self)  # type: ignore[method-assign]


def _make_wide(dtype: torch.dtype) -> Callable[..., Any]:
    """A `step` that computes in fp32, and keeps the state in `dtype`."""

    @wraps(DeepSpeedCPUAdam.step)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_in_fp32(self, lambda optimizer: type(self).step(optimizer), dtype)
        return loss

    return step


__path__ = _stand_for(__name__, "cpu_adam", "fused_adam")
__getattr__ = _explain_names(__name__)
