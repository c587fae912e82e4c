"""`deepspeed.ops.adagrad`: torch's Adagrad with DeepSpeed's arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad, under the name that DeepSpeed uses for state on the host."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


__path__ = _stand_for(__name__, "cpu_adagrad")
__getattr__ = _explain_names(__name__)
