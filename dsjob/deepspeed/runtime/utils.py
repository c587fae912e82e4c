"""`deepspeed.runtime.utils`: what programs call of it."""

from __future__ import annotations

import torch

from dsjob.deepspeed.utils import logger


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs, if `force`, the GiB that tensors have on the GPU now and had at most."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB on the device, at most %.2f GiB", message, now, most)


def clip_grad_norm_(parameters: object, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """As torch's, for a program's own optimizers; engines clip by `gradient_clipping`."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[arg-type]
