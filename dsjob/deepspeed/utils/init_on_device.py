"""`deepspeed.utils.init_on_device`: where a program builds a model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names


class OnDevice:
    """A context in which new modules and tensors are on a device, and floating-point ones have a dtype by default."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> None:
        self._entered = ExitStack()
        if self.enabled:
            self._entered.enter_context(torch.device(self.device))
            self._entered.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        self._entered.close()


__getattr__ = _explain_names(__name__)
