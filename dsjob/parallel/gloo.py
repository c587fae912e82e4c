"""FSDP2's two collectives on CPU, implemented with messages between pairs of ranks.

gloo's own collectives are slower, especially reduce-scatter; `benchmarks/engine.py` measures a step with either. Sums
over more than two ranks are computed in the communicated dtype, as in gloo, and in an order that differs by rank but
not by run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

TAG = 1414  # separates these messages from the program's own


def exchange_directly(unit: FSDPModule, number: int) -> None:
    """Makes a unit gather and reduce with the functions of this module. number: of the unit, the same on all ranks."""
    unit.set_custom_all_gather(_AllGather(number))  # type: ignore[arg-type]
    unit.set_custom_reduce_scatter(_ReduceScatter(number))  # type: ignore[arg-type]


class _Comm:
    def __init__(self, number: int) -> None:
        # Ranks that exchange different units must not get each other's values.
        self._tag = TAG + number

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    """Like `all_gather_into_tensor`: fills `output_tensor` [ranks * n] with each rank's `input_tensor` [n].
    Synchronous."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        rank, size = group.rank(), group.size()
        parts = output_tensor.view(size, -1)
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        if input_tensor.numel() == 0:
            return
        # Each rank starts with its right neighbour: if all began with rank 0, its link would be the bottleneck.
        others = [(rank + distance) % size for distance in range(1, size)]
        works = [dist.isend(input_tensor, group=group, group_dst=other, tag=self._tag) for other in others]
        works += [dist.irecv(parts[other], group=group, group_src=other, tag=self._tag) for other in others]
        for work in works:
            _wait(work)


class _ReduceScatter(_Comm):
    """Like `reduce_scatter_tensor`: `output_tensor` [n] is this rank's part of the sum, or mean, of [ranks * n]."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        rank, size = group.rank(), group.size()
        parts = input_tensor.view(size, -1)
        output_tensor.copy_(parts[rank])
        if input_tensor.numel() == 0:
            return
        received = torch.empty_like(output_tensor)
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            # One distance at a time: each rank sends one message and receives one, so a single buffer is enough.
            sending = dist.isend(parts[to], group=group, group_dst=to, tag=self._tag)
            _wait(dist.irecv(received, group=group, group_src=source, tag=self._tag))
            _wait(sending)
            output_tensor += received
        if op == dist.ReduceOp.AVG:
            output_tensor /= size
        else:
            assert op == dist.ReduceOp.SUM, op


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # it is None only on a rank outside the group
    work.wait()
