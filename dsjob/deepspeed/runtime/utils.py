"""`deepspeed.runtime.utils`: the functions that programs use."""

from __future__ import annotations

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.utils import logger


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, logs the current and the peak memory of tensors on the GPU, in GiB."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB on the device, at most %.2f GiB", message, now, most)


def clip_grad_norm_(parameters: object, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """torch's function, for a program's own optimizers. Engines clip according to `gradient_clipping`."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[arg-type]


__getattr__ = _explain_names(__name__)
