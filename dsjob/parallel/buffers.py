"""Buffers of a model, such as running statistics, on several ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from dsjob.compute.precision import DTYPES
from dsjob.contract.precisions import DataTypes
from dsjob.parallel.strategy import broadcast
from dsjob.ranks.mesh import World
from dsjob.torch_private import NormBase, list_saved_buffers


def cast_buffers(model: nn.Module, types: DataTypes, compute: torch.dtype) -> None:
    """Casts floating-point buffers as `data_types` says. Running statistics compute in fp32 (`statistics`)."""
    wanted = DTYPES[types.buffer_dtype] if types.buffer_dtype is not None else None
    kept = _find_kept(model, types.keep_in_fp32_modules, compute)
    for owner, module in model.named_modules() if wanted or kept else ():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_floating_point() or isinstance(module, NormBase):
                continue
            full = f"{owner}.{name}" if owner else name
            dtype = torch.float32 if any(pattern.search(full) for pattern in kept) else wanted
            setattr(module, name, buffer.to(dtype or buffer.dtype))


def _find_kept(model: nn.Module, asked: object, compute: torch.dtype) -> list[re.Pattern[str]]:
    """Patterns of the names of buffers that stay in fp32: `asked`, or those that models of transformers list."""
    if compute == torch.float32:
        return []
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        return [_compile(str(text)) for text in asked]
    found = []
    for owner, module in model.named_modules():
        names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if compute == torch.float16:
            names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
        before = f"^{re.escape(owner)}\\..*" if owner else ""
        found += [_compile(name, before) for name in sorted(names)]
    return found


def _compile(text: str, before: str = "") -> re.Pattern[str]:
    return re.compile(before + ".*".join(map(re.escape, text.split("*"))))


class SharedBuffers:
    """Starts each step with rank 0's buffers on all ranks, so that a checkpoint is valid for all of them.

    Buffers that are not saved, such as position ids and the frequencies of rotary embeddings, stay as each rank has
    them: most never change, and sending them would make every step wait.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world, self._differ = world, True
        # A walk over all modules takes as long as a step of a small one.
        self._owners = [module for module in model.modules() if list_saved_buffers(module)]

    def share(self) -> None:
        """Called at the start of a micro step. A collective in the first one of a step."""
        if not (self._differ and self._owners):
            return
        # Listed each time, because a model may have replaced them.
        found = [getattr(owner, name) for owner in self._owners for name in list_saved_buffers(owner)]
        broadcast([buffer for buffer in found if buffer is not None], self._world)
        self._differ = False

    def end_step(self) -> None:
        """Called after a step: forward passes may have changed buffers on each rank."""
        self._differ = True
