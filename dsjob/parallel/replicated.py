"""The whole model on each rank: ZeRO stage 0, and every stage when there is one rank alone."""

# Without `from __future__ import annotations`: DDP compares those of a communication hook with its own classes.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future, collect_all
from torch.nn.parallel import DistributedDataParallel

from dsjob.autocast import marked_dtype
from dsjob.mesh import World
from dsjob.parallel.base import Strategy, align, mark_safe, widen
from dsjob.precision import Masters, Precision, cast_floats


class Replicated(Strategy):
    """DDP, or the bare module on one rank; below fp32, the model computes on a copy of fp32 masters."""

    def __init__(self, model: nn.Module, *, world: World, precision: Precision) -> None:
        self.module = model.to(world.device)
        if world.world_size > 1:
            align(model, world)  # DDP would do it too late: after the masters have been copied
        self._dtype = precision.compute
        self._copies: Masters | None
        if precision.compute == torch.float32:
            widen(model)
            self._copies = None
        else:
            self._copies = Masters(model, precision.compute)
        mark_safe(model, precision)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = self._copies.weights if self._copies else trainable
        self._ddp: DistributedDataParallel | None = None
        if world.world_size > 1 and trainable:
            self._ddp = DistributedDataParallel(
                model,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # Accepts parameters without gradient. It also keeps DDP from rearranging its buckets after the first
                # step: with three ranks and more, the order of additions, and so the last bits, would depend on
                # whether a run was resumed.
                find_unused_parameters=True,
                init_sync=False,
            )
            if precision.autocast is not None:
                self._ddp.register_comm_hook(precision.reduce, _reduce_each)
            elif precision.reduce != precision.compute:
                self._ddp.register_comm_hook(precision.reduce, _reduce_in)

    def start_micro_step(self, boundary: bool) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = boundary and not self.communicates

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype != torch.float32:
            args, kwargs = cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype)
        # Without gradients DDP has nothing to add, and would wait for buffers of ranks that do not evaluate.
        return (self._ddp if self._ddp and torch.is_grad_enabled() else self.module)(*args, **kwargs)

    def finish_gradients(self) -> None:
        if self._copies is not None:
            self._copies.take_gradients()

    def finish_step(self) -> None:
        super().finish_step()
        if self._ddp is not None:
            # The next step begins with rank 0's buffers, also where this one has reduced nothing.
            self._ddp.require_forward_param_sync = True
        if self._copies is not None:
            self._copies.give_weights()


def _reduce_in(dtype: torch.dtype, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket of gradients in `dtype`."""
    own = bucket.buffer()
    sent = own.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)

    def copy_back(_: Any) -> Tensor:
        own.copy_(sent)
        return own

    future: Future[Tensor] = work.get_future().then(copy_back)
    return future


def _reduce_each(dtype: torch.dtype, bucket: GradBucket) -> Future[Tensor]:
    """Averages the gradients in a bucket, each in the dtype that its parameter is marked with, else in `dtype`."""
    own = bucket.buffer()
    groups: dict[torch.dtype, list[Tensor]] = {}
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        groups.setdefault(marked_dtype(parameter) or dtype, []).append(gradient)
    sent = [torch.cat([g.reshape(-1) for g in group]).to(low) for low, group in groups.items()]
    works = [dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True) for flat in sent]

    def copy_back(_: Any) -> Tensor:
        for flat, group in zip(sent, groups.values(), strict=True):
            parts = torch.split_with_sizes(flat, [g.numel() for g in group])
            torch._foreach_copy_(group, [part.view_as(g) for part, g in zip(parts, group, strict=True)])
        return own

    future: Future[Tensor] = collect_all([work.get_future() for work in works]).then(copy_back)
    return future
