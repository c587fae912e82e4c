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
from dsjob.parallel.masters import Masters, choose_host
from dsjob.precision import Precision, cast_floats
from dsjob.spec import Zero


class Replicated(Strategy):
    """DDP, or the bare module on one rank; below fp32, or offloaded, the model computes on a copy of fp32 masters."""

    def __init__(self, model: nn.Module, *, zero: Zero, world: World, precision: Precision) -> None:
        self.module = model.to(world.device)
        if world.world_size > 1:
            align(model, world)  # DDP would do it too late: after the masters have been copied
        self._dtype = precision.compute
        low = precision.compute != torch.float32
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        offload = zero.offload_optimizer if zero.offload == "optimizer" else None
        # As on several ranks, where stages 2 and 3 add up in the shards of the masters.
        in_fp32 = zero.stage > 1 if precision.accumulate is None else precision.accumulate == torch.float32
        self._sums_in_masters = in_fp32 and (low or offload is not None)
        self._boundary = True
        if not low:
            widen(model)
        host = choose_host(trainable, offload.ratio) if offload else set()
        copied = {name: p for name, p in trainable.items() if p.is_floating_point() and (low or name in host)}
        if copied:
            self.copies = Masters(copied, host, pin=offload.pin_memory if offload else False)
        if low:
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(precision.compute)
        if self.copies is not None and offload is not None:
            self.copies.stream(lambda: self._boundary or self._sums_in_masters)
        mark_safe(model, precision)
        copies = self.copies.weights if self.copies is not None else {}
        self.masters = {n: copies.get(n, p) for n, p in trainable.items() if n in copies or not low}
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
            before = precision.predivide or world.world_size
            if precision.autocast is not None:
                self._ddp.register_comm_hook((precision.reduce, before), _reduce_each)
            elif precision.reduce != precision.compute or before != world.world_size:
                self._ddp.register_comm_hook((precision.reduce, before), _reduce_in)

    def start_micro_step(self, boundary: bool) -> None:
        self._boundary = boundary
        if self._sums_in_masters and self.copies is not None:
            self.copies.take_gradients()  # of the micro step before
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = boundary or self._sums_in_masters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype != torch.float32:
            args, kwargs = cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype)
        # Without gradients DDP has nothing to add, and would wait for buffers of ranks that do not evaluate.
        return (self._ddp if self._ddp and torch.is_grad_enabled() else self.module)(*args, **kwargs)


def _reduce_in(how: tuple[torch.dtype, float], bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket of gradients in a dtype; they are divided by a number before, and by the rest afterwards."""
    (dtype, before), own = how, bucket.buffer()
    (sent,) = flats = [own.to(dtype, copy=True)]

    def copy_back(_: Any) -> Tensor:
        _divide_rest(flats, before)
        own.copy_(sent)
        return own

    future: Future[Tensor] = _sum(flats, before)[0].then(copy_back)
    return future


def _reduce_each(how: tuple[torch.dtype, float], bucket: GradBucket) -> Future[Tensor]:
    """As `_reduce_in`, each gradient in the dtype that its parameter is marked with, where it is."""
    (dtype, before), own = how, bucket.buffer()
    groups: dict[torch.dtype, list[Tensor]] = {}
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        groups.setdefault(marked_dtype(parameter) or dtype, []).append(gradient)
    sent = [torch.cat([g.reshape(-1) for g in group]).to(low) for low, group in groups.items()]

    def copy_back(_: Any) -> Tensor:
        _divide_rest(sent, before)
        for flat, group in zip(sent, groups.values(), strict=True):
            parts = torch.split_with_sizes(flat, [g.numel() for g in group])
            torch._foreach_copy_(group, [part.view_as(g) for part, g in zip(parts, group, strict=True)])
        return own

    future: Future[Tensor] = collect_all(_sum(sent, before)).then(copy_back)
    return future


def _sum(flats: list[Tensor], before: float) -> list[Future[Any]]:
    """Begins to sum tensors over the ranks, in place, divided by `before`."""
    works = [dist.all_reduce(flat.div_(before), async_op=True) for flat in flats]
    return [work.get_future() for work in works]


def _divide_rest(flats: list[Tensor], before: float) -> None:
    rest = before / dist.get_world_size()
    if rest != 1:
        torch._foreach_mul_(flats, rest)
