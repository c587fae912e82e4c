"""fp32 masters beside the parameters that a model computes with: gradients go to them, new weights come back.

They are on the model's device, or on the host, where the optimizer then steps. Where masters and parameters are on two
devices and host memory is pinned, copies run beside the passes and beside the optimizer's step.

Masters are fp32 whatever dtype the model comes in. Under FSDP2 the sharded parameters are the masters, and compute
copies come from MixedPrecisionPolicy; a replicated bf16 model is cast in place and has masters beside it, as in
DeepSpeed. Offloading changes no bit of a run and nothing in a checkpoint. All gradients have to arrive before the
first weight is stepped, because clipping needs their norm.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dsjob.contract.sharding import choose_share
from dsjob.optim.parts import can_step_in_parts, step_in_parts
from dsjob.optim.shards import local
from dsjob.parallel.pairs import HOST, Pair, Pairs

PART = 64 << 20  # bytes of masters on the host that are stepped before their new weights are sent


class Masters(Pairs):
    """fp32 copies of parameters. They outlive a cast of the parameters, which has to follow and is the caller's."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], host: Container[str] = (), pin: bool = False) -> None:
        """`host`: names of those whose masters are on the host, in page-locked memory for `pin`."""
        # A stream of its own only where there is something to overlap: pageable memory blocks the host anyway.
        far = [p.device for name, p in parameters.items() if name in host and p.device.type == "cuda"]
        side = torch.cuda.Stream(far[0]) if far and pin else None  # type: ignore[no-untyped-call]
        pairs = {}
        for name, parameter in parameters.items():
            on_host = name in host
            device, pins = HOST if on_host else parameter.device, on_host and side is not None
            master = torch.empty_like(parameter.data, dtype=torch.float32, device=device, pin_memory=pins)
            # empty_like keeps the placements of a DTensor; only this rank's part, local(...), has bytes to copy.
            local(master).copy_(local(parameter.data))
            pairs[name] = Pair(parameter, nn.Parameter(master), on_host)
        super().__init__(pairs, side)

    @torch.no_grad()
    def take_gradients(self, wait: bool = True) -> None:
        """Adds the parameters' gradients to the masters', in fp32, and drops them; waits for those on their way."""
        self._take_first()
        for pair in self._pairs.values():
            self._take(pair)
        if wait:
            self._arrive()

    def _take_first(self) -> None:
        """Takes the first gradients of a step that are where their masters are, all at once."""
        taken, kept = [], []
        for pair in self._pairs.values():
            if pair.parameter.grad is not None and not pair.on_host and pair.master.grad is None:
                pair.master.grad = torch.empty_like(pair.master.data)
                taken.append(local(pair.parameter.grad))
                kept.append(local(pair.master.grad))
                pair.parameter.grad = None
        # Copied in groups, and cast to fp32 on the way: a kernel per parameter would cost more than the copy.
        if taken:
            torch._foreach_copy_(kept, taken)

    def _take(self, pair: Pair) -> None:
        if pair.parameter.grad is None:
            return
        gradient = local(pair.parameter.grad)
        pair.parameter.grad = None
        if not pair.on_host or not gradient.is_cuda:
            if gradient.is_cuda:
                # FSDP2 may have made it on another stream, whose next gradient would get its memory.
                gradient.record_stream(torch.cuda.current_stream(gradient.device))
            _add(pair, gradient)
            return
        # A pair holds one gradient on its way: that of an earlier backward pass is added up first.
        if pair.taken is not None:
            self._arrive()
        pins = self._side is not None
        pair.taken = torch.empty_like(gradient, device=HOST, pin_memory=pins)
        with self._beside():
            # Without record_stream the allocator would hand out the gradient's memory while the copy still reads it.
            pair.taken.copy_(gradient, non_blocking=pins)
            gradient.record_stream(torch.cuda.current_stream(gradient.device))

    def _arrive(self) -> None:
        """Adds what is on its way to the host, once all of it is there."""
        if self._side is not None and any(pair.taken is not None for pair in self._pairs.values()):
            # The host is about to read what the copies write; it waits once for all of them.
            self._side.synchronize()
        for pair in self._pairs.values():
            taken, pair.taken = pair.taken, None
            if taken is not None:
                _add(pair, taken)

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Has `optimizer` step. New weights from the host travel part by part, while it steps the next part."""
        parts = list(_split([p for p in self._pairs.values() if p.on_host and p.master.grad is not None]))
        if len(parts) < 2 or not can_step_in_parts(optimizer):
            optimizer.step()
            return

        def send(number: int) -> None:
            self._send(parts[number])
            for pair in parts[number]:
                pair.is_sent = True

        step_in_parts(optimizer, [[pair.master for pair in part] for part in parts], send)


def _split(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Successive pairs, each list of no more than `PART` bytes if it has several."""
    part: list[Pair] = []
    size = 0
    for pair in pairs:
        own = local(pair.master).nbytes
        if part and size + own > PART:
            yield part
            part, size = [], 0
        part.append(pair)
        size += own
    if part:
        yield part


def _add(pair: Pair, gradient: Tensor) -> None:
    """Adds to the master's gradient. `gradient`: of this rank's share, on the master's device."""
    if pair.master.grad is not None:
        local(pair.master.grad).add_(gradient)
        return
    kept = pair.sums if pair.sums is not None else torch.empty_like(pair.master.data)
    local(kept).copy_(gradient)
    pair.master.grad = kept
    if pair.on_host:  # of which the system would give new pages each time
        pair.sums = kept


def use_cores(device: torch.device) -> None:
    """Lets what a rank on a GPU computes on the host, as an offloaded optimizer does, use its share of the cores.

    torchrun gives each rank a single thread (OMP_NUM_THREADS=1); a number that somebody has chosen stays.
    """
    if device.type != "cuda" or torch.get_num_threads() > 1 or not hasattr(os, "sched_getaffinity"):
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def choose_host(parameters: Mapping[str, nn.Parameter], ratio: float) -> set[str]:
    """Names of the parameters whose masters a share of all elements on the host takes, as `planning` counts them."""
    names = list(parameters)
    return {names[number] for number in choose_share([p.numel() for p in parameters.values()], ratio)}
