"""Where the inputs of what is computed again wait for the backward pass: as they are, in slices over model-parallel
ranks, in buffers that are allocated once, on the host.

Autograd hands them over by `torch.autograd.graph.saved_tensors_hooks`. What is not floating point stays as it is.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.contract.spec import ActivationCheckpointing
from dsjob.errors import UsageError

_Kind = tuple[torch.dtype, torch.device, int]


@dataclass(slots=True, weakref_slot=True)
class Kept:
    """What is kept of a tensor, flat, and what it takes to make it whole again."""

    part: Tensor
    shape: torch.Size
    device: torch.device
    sliced: bool


class Store:
    """Keeps tensors as the section says. `group`: the ranks that hold the same inputs, None where there are none."""

    def __init__(self, section: ActivationCheckpointing, group: dist.ProcessGroup | None = None) -> None:
        self.section = section
        self._group = group if section.partition_activations else None
        self._size = dist.get_world_size(group) if self._group is not None else 1
        self._buffers: dict[_Kind, _Buffer] = {}

    def __deepcopy__(self, memo: Any) -> Store:
        return self  # a copy of a model keeps its inputs in the same place

    @property
    def changes_anything(self) -> bool:
        """Whether tensors are kept in any other way than as they are."""
        return self._size > 1 or self.section.cpu_checkpointing or self.section.contiguous_memory_optimization

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Kept | Tensor:
        """What to keep of `tensor`. Raises UsageError where number_checkpoints are kept already."""
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return tensor
        flat = tensor.detach().reshape(-1)
        part = self._cut(flat) if self._size > 1 else flat
        target = torch.device("cpu") if self.section.cpu_checkpointing else tensor.device
        kept = Kept(part, tensor.shape, tensor.device, self._size > 1)
        if self.section.contiguous_memory_optimization:
            self._place(kept, target)
        elif target != tensor.device:
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=tensor.is_cuda)
            # No wait: the way back is taken on the same stream, and page-locked memory is not given out in between.
            kept.part = host.copy_(part, non_blocking=True)
        return kept

    @torch.no_grad()
    def unpack(self, kept: Kept | Tensor) -> Tensor:
        """The tensor of which `kept` was kept. Of slices: called by all ranks of the group, in the same order."""
        if isinstance(kept, Tensor):
            return kept
        part = kept.part.to(kept.device, non_blocking=True)
        if kept.sliced:
            whole = part.new_empty(self._size * part.numel())
            dist.all_gather(list(whole.chunk(self._size)), part, group=self._group)
            part = whole[: math.prod(kept.shape)]
        return part.view(kept.shape)

    def reset(self) -> None:
        """Gives up the buffers."""
        self._buffers.clear()

    def _cut(self, flat: Tensor) -> Tensor:
        """This rank's slice, a copy; all are as long as the first, so the last may end in zeros."""
        length = math.ceil(flat.numel() / self._size)
        start = dist.get_rank(self._group) * length
        own = flat[start : start + length]
        part = flat.new_zeros(length)
        part[: own.numel()] = own
        return part

    def _place(self, kept: Kept, device: torch.device) -> None:
        """Moves what is kept to a buffer on `device`, for as long as anybody refers to `kept`."""
        kind = (kept.part.dtype, device, kept.part.numel())
        if kind not in self._buffers:
            self._buffers[kind] = _Buffer(kind, self.section.number_checkpoints or 1)
        self._buffers[kind].take(kept)


class _Buffer:
    """Memory for `number` tensors of one kind, allocated at once."""

    def __init__(self, kind: _Kind, number: int) -> None:
        dtype, device, length = kind
        self._rows = torch.empty(number, length, dtype=dtype, device=device)
        self._free = list(range(number))

    def take(self, kept: Kept) -> None:
        if not self._free:
            raise UsageError(
                f"more than number_checkpoints={len(self._rows)} inputs of {self._rows.shape[1]} elements are kept",
                hint="set activation_checkpointing.number_checkpoints to as many as a forward pass keeps; "
                "call reset() after forward passes without a backward pass",
            )
        row = self._free.pop()
        kept.part = self._rows[row].copy_(kept.part)
        weakref.finalize(kept, self._free.append, row)
