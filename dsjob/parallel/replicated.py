"""The whole model on each rank: ZeRO stage 0, and every stage when there is one rank alone."""

# Without `from __future__ import annotations`: DDP compares those of a communication hook with its own classes.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dsjob.mesh import World
from dsjob.parallel.base import Strategy, align, widen
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
            if precision.reduce != precision.compute:
                self._ddp.register_comm_hook(precision.reduce, _reduce_in)

    def start_micro_step(self, boundary: bool) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = boundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype != torch.float32:
            args, kwargs = cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype)
        # Without gradients DDP has nothing to add, and would wait for buffers of ranks that do not evaluate.
        return (self._ddp if self._ddp and torch.is_grad_enabled() else self.module)(*args, **kwargs)

    def finish_gradients(self) -> None:
        if self._copies is not None:
            self._copies.take_gradients()

    def finish_step(self) -> None:
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
