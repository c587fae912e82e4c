"""Stores the inputs of recomputed functions until the backward pass: unchanged, sliced over model-parallel ranks, in
preallocated buffers, or on the host.

Autograd passes them through `torch.autograd.graph.saved_tensors_hooks`. Tensors that are not floating point are kept
unchanged.
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
    """The stored part of a tensor (flat), and what is needed to rebuild the tensor."""

    part: Tensor
    shape: torch.Size
    device: torch.device
    sliced: bool


class Store:
    """Stores tensors as the section says. group: the ranks that have the same inputs; None if there are no others."""

    def __init__(self, section: ActivationCheckpointing, group: dist.ProcessGroup | None = None) -> None:
        self.section = section
        self._group = group if section.partition_activations else None
        self._size = dist.get_world_size(group) if self._group is not None else 1
        self._buffers: dict[_Kind, _Buffer] = {}

    def __deepcopy__(self, memo: Any) -> Store:
        return self  # copies of a model share one store

    @property
    def changes_anything(self) -> bool:
        """Whether the store does anything but keep tensors unchanged."""
        return self._size > 1 or self.section.cpu_checkpointing or self.section.contiguous_memory_optimization

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Kept | Tensor:
        """Stores `tensor`. Raises UsageError if number_checkpoints tensors are stored already."""
        # Integer inputs, such as token ids, are small. An empty tensor cannot be sliced.
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return tensor
        flat = tensor.detach().reshape(-1)
        # [elements / ranks, rounded up] on each rank, or all elements: one dim.
        part = self._cut(flat) if self._size > 1 else flat
        target = torch.device("cpu") if self.section.cpu_checkpointing else tensor.device
        kept = Kept(part, tensor.shape, tensor.device, self._size > 1)
        if self.section.contiguous_memory_optimization:
            self._place(kept, target)
        elif target != tensor.device:
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=tensor.is_cuda)
            # No wait is needed: the copy back runs on the same stream, and until then the pinned memory is not reused.
            kept.part = host.copy_(part, non_blocking=True)
        return kept

    @torch.no_grad()
    def unpack(self, kept: Kept | Tensor) -> Tensor:
        """Rebuilds a stored tensor. For slices, this is a collective: all ranks must call it in the same order."""
        if isinstance(kept, Tensor):
            return kept
        part = kept.part.to(kept.device, non_blocking=True)
        if kept.sliced:
            # [ranks * length], one dim: the slices in rank order. The padding of the last ones is cut off below.
            whole = part.new_empty(self._size * part.numel())
            dist.all_gather(list(whole.chunk(self._size)), part, group=self._group)
            part = whole[: math.prod(kept.shape)]
        return part.view(kept.shape)

    def reset(self) -> None:
        """Frees the buffers."""
        self._buffers.clear()

    def _cut(self, flat: Tensor) -> Tensor:
        """A copy of this rank's slice. All slices have the same length, so the last one may be padded with zeros."""
        length = math.ceil(flat.numel() / self._size)
        start = dist.get_rank(self._group) * length
        own = flat[start : start + length]
        # A copy: a slice of `flat` would keep the whole tensor in memory.
        part = flat.new_zeros(length)
        part[: own.numel()] = own
        return part

    def _place(self, kept: Kept, device: torch.device) -> None:
        """Moves the stored part into a buffer on `device`. Its row is freed when `kept` is garbage collected."""
        kind = (kept.part.dtype, device, kept.part.numel())
        if kind not in self._buffers:
            self._buffers[kind] = _Buffer(kind, self.section.number_checkpoints or 1)
        self._buffers[kind].take(kept)


class _Buffer:
    """Preallocated memory for `number` tensors of one kind: [number, length]."""

    def __init__(self, kind: _Kind, number: int) -> None:
        dtype, device, length = kind
        self._rows = torch.empty(number, length, dtype=dtype, device=device)
        self._free = list(range(number))

    def take(self, kept: Kept) -> None:
        if not self._free:
            raise UsageError(
                f"a forward pass stores more than number_checkpoints={len(self._rows)} inputs of"
                f" {self._rows.shape[1]} elements",
                hint="increase activation_checkpointing.number_checkpoints; "
                "call reset() after forward passes without a backward pass",
            )
        # Any free row will do: backward passes need not free them in order.
        row = self._free.pop()
        kept.part = self._rows[row].copy_(kept.part)
        weakref.finalize(kept, self._free.append, row)
