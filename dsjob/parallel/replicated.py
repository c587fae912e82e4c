"""The whole model on each rank: ZeRO stage 0, and all stages on a single rank."""

# No `from __future__ import annotations` here: DDP checks that the annotations of a communication hook are its classes.

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dsjob.compute.aliases import alias
from dsjob.compute.autocast import marked_dtype
from dsjob.compute.precision import Precision, cast_floats
from dsjob.contract.spec import Zero
from dsjob.optim.onebit.own_gradients import wants_own_gradients
from dsjob.optim.parts import split
from dsjob.parallel.buffers import SharedBuffers
from dsjob.parallel.masters import Masters, choose_host, use_cores
from dsjob.parallel.presharded import make_whole, require_shards
from dsjob.parallel.statistics import keep_statistics_wide
from dsjob.parallel.strategy import Disk, Strategy, align, mark_safe, widen
from dsjob.ranks.mesh import World
from dsjob.torch_private import keep_outputs

_BUCKET = 32 << 20  # bytes of gradients that are reduced together, where DDP does not do it


class Replicated(Strategy):
    """DDP, or the bare module on one rank. In half precision, or with offloading, the model computes on a copy of fp32
    masters.

    interleaved: several forward passes may come before a backward pass, as in a pipeline. DDP cannot follow that, so
    gradients are reduced after the last backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        zero: Zero,
        world: World,
        precision: Precision,
        disk: Disk,
        interleaved: bool = False,
    ) -> None:
        super().__init__(model, world, precision, disk)
        require_shards(model, world)
        make_whole(model)
        self.module = model.to(world.device)
        if world.data_size > 1:
            align(model, world)  # DDP's own synchronisation would be too late: masters are copied before it
        self._dtype, self._device = precision.compute, world.device
        self._armed = False  # DDP was told to reduce in a backward pass since gradients were last taken
        self._by_hand = False  # this step may have gradients that DDP does not reduce
        self._entered = False  # a backward pass of the last forward pass has begun
        low = precision.compute != precision.master  # then masters are separate
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        offload = zero.offload_optimizer if zero.offload == "optimizer" else None
        # As on several ranks: at stages 2 and 3, gradients accumulate in the shards of the masters.
        in_fp32 = zero.stage > 1 if precision.accumulate is None else precision.accumulate == torch.float32
        self._sums_in_masters = in_fp32 and (low or offload is not None)
        self._boundary = True
        if not low:
            widen(model, precision.master)
        host = choose_host(trainable, offload.ratio) if offload else set()
        if host:
            use_cores(world.device)
        copied = {name: p for name, p in trainable.items() if p.is_floating_point() and (low or name in host)}
        if copied:
            self.copies = Masters(
                copied, host, pin=offload is not None and offload.pin_memory, disk=disk, dtype=precision.master
            )
        if precision.compute != torch.float32:
            keep_statistics_wide(model)
            _cast(model, precision.compute)
        if self.copies is not None and offload is not None:
            # Before the boundary, gradients accumulate on the device. Only the reduced sum is copied to the host.
            self.copies.stream(lambda: (self._boundary and not self._interleaved) or self._sums_in_masters)
        mark_safe(model, precision)
        copies = self.copies.masters if self.copies is not None else {}
        # In fp32 without offloading, a parameter is its own master.
        self.masters = {n: copies.get(n, p) for n, p in trainable.items() if n in copies or not low}
        before = precision.predivide or world.data_size
        self._how = _How(precision.reduce, before, world.data_size, world.data_group)
        self._interleaved = interleaved and world.data_size > 1
        self._shared_buffers = SharedBuffers(model, world)
        wraps = world.data_size > 1 and bool(trainable) and not interleaved
        self._ddp = self._wrap(model, precision) if wraps else None

    def _wrap(self, model: nn.Module, precision: Precision) -> DistributedDataParallel:
        device = self.world.device
        ddp = DistributedDataParallel(
            model,
            process_group=self.world.data_group,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # Allows parameters without gradient. It also keeps DDP from rearranging its buckets after the first step.
            # Otherwise, with three or more ranks, the order of additions, and so the last bits, would depend on whether
            # a run was resumed. It costs one small all-reduce per step.
            find_unused_parameters=True,
            init_sync=False,
        )
        # For parameters without gradient, DDP adds an autograd node, which copies all outputs, logits included, so that
        # programs may change them in place. `_call` returns aliases instead.
        keep_outputs(ddp)
        ddp.broadcast_buffers = False  # `_shared_buffers` does that; as an argument, torch 2.13 warns of it
        _free_group_last(ddp)
        if precision.autocast is not None:
            ddp.register_comm_hook(self._how, _reduce_each)
        elif precision.reduce != precision.compute or self._how.before != self.world.data_size:
            ddp.register_comm_hook(self._how, _reduce_in)
        return ddp

    @property
    def _reduces(self) -> bool:
        """Whether gradients are reduced here: on several ranks, unless the optimizer takes each rank's own."""
        return (self._ddp is not None or self._interleaved) and not wants_own_gradients(self.optimizer)

    def start_micro_step(self, boundary: bool, sync: bool = True) -> None:
        self._boundary = boundary
        if self._ddp is not None or self._interleaved:
            self._shared_buffers.share()
        if self._sums_in_masters and self.copies is not None:
            self._take_reduced(self.copies)
        if self._ddp is None:
            return
        # DDP decides in the forward pass whether the following backward pass reduces. Backward passes of other forward
        # passes do not, nor do those whose boundary was moved in between.
        reduces = sync and self._reduces and (boundary or self._sums_in_masters)
        # A second forward pass before the armed backward pass: DDP reduces only one of the two, so reduce_gradients
        # must reduce the rest.
        self._by_hand = self._by_hand or self._armed
        self._armed = self._armed or reduces
        self._entered = False
        self._ddp.require_backward_grad_sync = reduces

    def _take_reduced(self, copies: Masters) -> None:
        """Reduces the gradients of earlier backward passes, and adds them to those of the masters."""
        if self._reduces and not self._interleaved:
            if not self._armed or all(p.grad is None for p in self.module.parameters()):
                return
            self.reduce_gradients()
            self._armed = self._by_hand = False
        copies.take_gradients(wait=False)

    def reduce_gradients(self) -> None:
        if not self._reduces or (self._armed and not self._by_hand):
            return
        if self._interleaved and self._sums_in_masters and self.copies is not None:
            self.copies.take_gradients()
            trainable = list(self.masters.values())
        else:
            # Includes parameters that the program has frozen since: they may have gradients of earlier backward passes.
            trainable = [p for name, p in self.module.named_parameters() if name in self.masters]
        # Ranks may have used different parameters. All must reduce the same list, or their collectives would not match.
        # uint8 [parameters]: 1 where this rank has a gradient.
        used = torch.tensor([p.grad is not None for p in trainable], dtype=torch.uint8, device=self._device)
        dist.all_reduce(
            used, op=dist.ReduceOp.MAX, group=self.world.data_group
        )  # a gradient that some ranks lack is zero there
        found = [p for p, is_used in zip(trainable, used.tolist(), strict=True) if is_used]
        for parameter in found:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        started: list[tuple[Any, Callable[[], None]]] = []
        for part in split(found, lambda parameter: parameter.nbytes, _BUCKET):
            # Gradients that DDP has averaged already do not change: the mean of equal numbers.
            following = _average(part, [p.grad for p in part if p.grad is not None], self._how)
            _finish(started)
            started = following
        _finish(started)
        self._armed, self._by_hand = True, False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype != torch.float32:
            args, kwargs = cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype)
        # Without gradients DDP has nothing to do, and its autograd node would only cost time.
        if self._ddp is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        return alias(self._ddp(*args, **kwargs), lambda tensor: tensor.grad_fn is not None, self._enter_backward)

    def _enter_backward(self) -> None:
        # DDP reduces in the first of several backward passes through one forward pass, and none of the following ones.
        self._by_hand = self._by_hand or (self._armed and self._entered)
        self._entered = True

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._armed = self._by_hand = False

    def finish_step(self) -> None:
        super().finish_step()
        self._armed = self._by_hand = False
        self._shared_buffers.end_step()

    def close(self) -> None:
        super().close()
        self._ddp = None


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters, in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _free_group_last(ddp: DistributedDataParallel) -> None:
    """Makes Python free DDP's process group after its reducer.

    Attributes are freed in the order in which they were set. If the program has destroyed the process group before, the
    reducer would be its last owner, and would end gloo's threads while it holds the GIL. A thread that is just freeing
    the tensors of its last collective needs the GIL, so both would wait forever. Python's own reference releases it.
    """
    group = ddp.process_group
    del ddp.process_group
    ddp.process_group = group


class _How(NamedTuple):
    """How to average gradients: the communicated dtype, the divisor before the sum, and the ranks."""

    dtype: torch.dtype
    before: float
    ranks: int
    group: dist.ProcessGroup | None

    def divide_rest(self, summed: Tensor) -> Tensor:
        """Applies the part of the division that was not done before the sum."""
        rest = self.before / self.ranks
        return summed.mul_(rest) if rest != 1 else summed


def _reduce_in(how: _How, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket of gradients in another dtype."""
    # [elements of the bucket]. The model's gradients are views of it (gradient_as_bucket_view).
    own = bucket.buffer()
    # Dividing before the sum keeps fp16 from overflowing. `before` is that part of the division.
    sent = own.to(how.dtype, copy=True)
    work = dist.all_reduce(sent.div_(how.before), group=how.group, async_op=True)

    def copy_back() -> Tensor:
        return own.copy_(how.divide_rest(sent))

    return _finish_after([work], copy_back)


def _reduce_each(how: _How, bucket: GradBucket) -> Future[Tensor]:
    """Like `_reduce_in`, but uses the dtype that a parameter is marked with, if any."""
    own = bucket.buffer()
    pairs = _average(bucket.parameters(), bucket.gradients(), how)

    def copy_back() -> Tensor:
        for _, copy in pairs:
            copy()
        return own

    return _finish_after([work for work, _ in pairs], copy_back)


def _finish_after(works: Sequence[Any], finish: Callable[[], Tensor]) -> Future[Tensor]:
    """A future of `finish()`, which is called when all of `works` are done. `works` must be in the order they started.

    With NCCL, futures complete when a collective is launched. They carry events that order the callback after the
    collective on the device. Only a future made by `then` inherits these events; one made by `collect_all` has none.
    So this chains to the last future, and inside the callback waits for the earlier ones: with NCCL on the stream, with
    gloo in the thread, which has started them before.
    """
    *earlier, last = [work.get_future() for work in works]

    def wait_for_all(_: Any) -> Tensor:
        for future in earlier:
            future.wait()
        return finish()

    future: Future[Tensor] = last.then(wait_for_all)
    return future


def _finish(started: Sequence[tuple[Any, Callable[[], None]]]) -> None:
    for work, copy_back in started:
        work.wait()
        copy_back()


def _average(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], how: _How
) -> list[tuple[Any, Callable[[], None]]]:
    """Starts averaging gradients over the ranks, each in the dtype that its parameter is marked with, or `how.dtype`.

    Returns for each dtype its collective to wait for, and a function that then copies the result into the gradients.
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        groups.setdefault(marked_dtype(parameter) or how.dtype, []).append(gradient)

    def start(low: torch.dtype, group: list[Tensor]) -> tuple[Any, Callable[[], None]]:
        # One message per dtype: many small collectives would cost more than these copies.
        flat = torch.cat([g.reshape(-1) for g in group]).to(low).div_(how.before)

        def copy_back() -> None:
            parts = torch.split_with_sizes(how.divide_rest(flat), [g.numel() for g in group])
            torch._foreach_copy_(group, [part.view_as(g) for part, g in zip(parts, group, strict=True)])

        return dist.all_reduce(flat, group=how.group, async_op=True), copy_back

    return [start(low, group) for low, group in groups.items()]
