"""`deepspeed.runtime.utils`: the functions that programs use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.utils import logger
from dsjob.pipelines.partition import balance


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, logs the current and the peak memory of tensors on the GPU, in GiB."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB on the device, at most %.2f GiB", message, now, most)


def clip_grad_norm_(parameters: object, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """torch's function, for a program's own optimizers. Engines clip according to `gradient_clipping`."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[arg-type]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cuts a sequence into runs so that the largest sum of weights is as small as possible: the first index of each
    run, and the length. The last runs are empty if there are fewer items than parts."""
    parts = min(len(weights), num_parts)
    return [*balance(weights, parts), *[len(weights)] * (num_parts - parts)]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The same for runs that are equally long, as far as possible; the first ones are longer."""
    size, rest = divmod(num_items, num_parts)
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


__getattr__ = _explain_names(__name__)
