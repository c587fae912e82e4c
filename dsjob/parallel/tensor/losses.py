"""The loss of a vocabulary that ranks divide: each computes the logits of its part, and they are never put together.

In passes with gradients, the last layer returns a DTensor. `torch.nn.functional.cross_entropy` then exchanges a maximum
and two sums for each token (torch.distributed.tensor.parallel.loss_parallel). In other passes, logits are gathered.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from dsjob.parallel.tensor import regions
from dsjob.ranks.mesh import Ranks

_entered: list[Any] = []


def keep_logits_divided(model: nn.Module, head: nn.Module, ranks: Ranks, size: int, device: torch.device) -> None:
    """Makes `head`, whose outputs are divided, return logits as above. size: that of the vocabulary."""
    mesh = DeviceMesh.from_group(ranks.group, device.type)  # type: ignore[arg-type]

    def show(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and output.requires_grad):
            return regions.gather(output, -1, size, ranks)
        shape = torch.Size([*output.shape[:-1], size])
        # Without sizes, DTensor would take all parts to be equally long.
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(output.contiguous(), mesh, [Shard(-1)], run_check=False, shape=shape, stride=strides)

    head.register_forward_hook(show)
    model.register_forward_hook(lambda module, args, output: _show_scalars(output))
    # FSDP2 warns that logits which are a view must not be changed in place; nobody can change those of other ranks.
    text = rf"FSDP2-wrapped module \(FSDP{type(model).__name__}\) returned a view tensor"
    warnings.filterwarnings("ignore", text, UserWarning)
    if not _entered:
        # For the rest of the process: the handlers concern only DTensors, and backward passes need them too.
        context = loss_parallel()
        context.__enter__()
        _entered.append(context)


def _show_scalars(output: Any) -> Any:
    """Replaces the loss in a model's output, a DTensor that all ranks have, by a plain tensor."""
    if _is_scalar(output):
        return output.full_tensor()
    if isinstance(output, Mapping):
        for key, value in output.items():
            if _is_scalar(value):
                output[key] = value.full_tensor()  # type: ignore[index]
    elif isinstance(output, tuple) and any(map(_is_scalar, output)):
        return tuple(value.full_tensor() if _is_scalar(value) else value for value in output)
    return output


def _is_scalar(value: Any) -> bool:
    return isinstance(value, DTensor) and value.dim() == 0
