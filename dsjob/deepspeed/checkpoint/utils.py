"""`deepspeed.checkpoint.utils`: copies of tensors, for programs that save a state dict themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsjob.deepspeed.absent import explain_names as _explain_names


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of `item` in which every tensor is detached and a tensor of its own on `device`.

    item: a tensor, or lists, tuples and dicts with tensors at any depth; other values stay.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list | tuple):
        return type(item)([clone_tensors_for_torch_save(each, device) for each in item])
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(each, device) for key, each in item.items()})
    return item


__getattr__ = _explain_names(__name__)
