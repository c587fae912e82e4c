"""fp32 masters of parameters in lower precision, or on another device: they receive gradients, and return new weights.

Masters are on the model's device, or on the host, where the optimizer then steps, or on a disk (`optim.on_disk`). If
masters and parameters are on different devices and host memory is pinned, copies overlap with the passes and with the
optimizer's step.

Masters are fp32, whatever the dtype of the model, or bf16 (`bf16_master_weights_and_grads`). With FSDP2, the sharded
parameters themselves are the masters, and MixedPrecisionPolicy makes the compute copies. A replicated bf16 model is
cast in place and has separate masters, as in DeepSpeed, unless they are bf16. Offloading changes no bit of a run, and
nothing in a checkpoint. All gradients must arrive before the first weight is stepped, because clipping needs their
norm.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dsjob.contract.sharding import DISK_BUFFERS, choose_share
from dsjob.contract.spec import Aio, Zero
from dsjob.ops.disk import ScratchFile
from dsjob.optim import on_disk
from dsjob.optim.host import prefers_kernels, take_step
from dsjob.optim.on_disk import StateOnDisk
from dsjob.optim.parts import can_step_in_parts, split, step_in_parts
from dsjob.optim.shards import local
from dsjob.parallel.pairs import HOST, Pair, Pairs
from dsjob.ranks.heap import return_freed_memory

PART = 64 << 20  # bytes of masters on the host that are stepped at a time; then their new weights are sent

_MOST_REQUESTS = 64  # a thread each


class Masters(Pairs):
    """fp32 copies of parameters. Create them before casting the parameters, which is up to the caller."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        host: Container[str] = (),
        pin: bool = False,
        disk: StateOnDisk | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """host: names of parameters whose masters are on the host. pin: use pinned memory for them. disk: keeps them,
        and their optimizer state, between steps. dtype: of the masters. Raises StorageError."""
        self._disk = disk
        # A separate stream only helps with pinned memory: copies from and to pageable memory block the host.
        far = [p.device for name, p in parameters.items() if name in host and p.device.type == "cuda"]
        side = torch.cuda.Stream(far[0]) if far and pin else None  # type: ignore[no-untyped-call]
        pairs = {}
        for name, parameter in parameters.items():
            # Before the caller casts the parameters: the masters keep bits that a lower precision loses.
            on_host = name in host
            if on_host and disk is not None:
                kept = disk.keep(parameter.data, dtype)
                pairs[name] = Pair(parameter, nn.Parameter(kept), on_host, on_disk=True, is_sent=True)
                continue
            device, pins = HOST if on_host else parameter.device, on_host and side is not None
            # In the parameter's shape. For a shard, that is the whole shape, but it only has memory for this
            # rank's part.
            master = torch.empty_like(parameter.data, dtype=dtype, device=device, pin_memory=pins)
            # empty_like keeps the placements of a DTensor; only this rank's part, local(...), has bytes to copy.
            local(master).copy_(local(parameter.data))
            pairs[name] = Pair(parameter, nn.Parameter(master), on_host)
        super().__init__(pairs, side)

    @torch.no_grad()
    def take_gradients(self, wait: bool = True) -> None:
        """Adds the parameters' gradients to those of the masters, in fp32, and drops the former. wait: also finish
        copies to the host."""
        self._take_first()
        for pair in self._pairs.values():
            self._take(pair)
        if wait:
            self._arrive()

    def _take_first(self) -> None:
        """Takes the first gradients of a step on the same device as their masters, all together."""
        taken, kept = [], []
        for pair in self._pairs.values():
            if pair.parameter.grad is not None and not pair.on_host and pair.master.grad is None:
                pair.master.grad = torch.empty_like(pair.master.data)
                taken.append(local(pair.parameter.grad))
                kept.append(local(pair.master.grad))
                pair.parameter.grad = None
        # One grouped copy, which also casts to fp32: a kernel per parameter would cost more than the copy itself.
        if taken:
            torch._foreach_copy_(kept, taken)

    def _take(self, pair: Pair) -> None:
        if pair.parameter.grad is None:
            return
        gradient = local(pair.parameter.grad)
        pair.parameter.grad = None
        if not pair.on_host or not gradient.is_cuda or self._side is None:
            if gradient.is_cuda:
                # FSDP2 may have allocated it on another stream. Without this, that stream could reuse its memory now.
                gradient.record_stream(torch.cuda.current_stream(gradient.device))
            # A copy to pageable memory blocks the host until it has arrived, so nothing is gained by adding it later.
            _add(pair, gradient.to(HOST) if pair.on_host else gradient)
            return
        # A pair can hold only one gradient in transit, so first add that of an earlier backward pass.
        if pair.taken is not None:
            self._arrive()
        pair.taken = torch.empty_like(gradient, device=HOST, pin_memory=True)
        with self._beside():
            # Without record_stream, the allocator could reuse the gradient's memory while the copy still reads it.
            pair.taken.copy_(gradient, non_blocking=True)
            gradient.record_stream(torch.cuda.current_stream(gradient.device))

    def _arrive(self) -> None:
        """Adds the gradients in transit to the host, after waiting for all of them."""
        if self._side is not None and any(pair.taken is not None for pair in self._pairs.values()):
            # The host is about to read what the copies write. Wait once for all of them.
            self._side.synchronize()
        for pair in self._pairs.values():
            taken, pair.taken = pair.taken, None
            if taken is not None:
                _add(pair, taken)

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Steps `optimizer`. New weights from the host are sent part by part, while it steps the next part.

        Raises StorageError, and UsageError for an optimizer that cannot step state on a disk.
        """
        far = [p for p in self._pairs.values() if p.on_host and p.master.grad is not None]
        parts = list(split(far, lambda pair: local(pair.master).nbytes, PART if self._disk is None else on_disk.PART))

        def send(number: int) -> None:
            self._send(parts[number])
            for pair in parts[number]:
                pair.is_sent = True

        # With a single part, there is no step for its copies to overlap with.
        in_parts = len(parts) > 1 and can_step_in_parts(optimizer)

        def take(optimizer: Optimizer) -> None:
            targets = self._make_targets(in_parts) if prefers_kernels(optimizer) else {}
            self._cast |= {master: targets[master] for master in take_step(optimizer, targets)}

        stepped = [[pair.master for pair in part] for part in parts]
        if self._disk is not None:
            self._disk.step(optimizer, stepped, take, send)
        elif in_parts:
            step_in_parts(optimizer, stepped, take, send)
        else:
            take(optimizer)

    def _make_targets(self, for_devices: bool) -> dict[Tensor, Tensor]:
        """Where kernels shall write the new weights of the masters with a gradient, in their parameter's dtype.

        for_devices: also for parameters on a device, in memory that their copies start from.
        """
        targets: dict[Tensor, Tensor] = {}
        for pair in self._pairs.values():
            source, target = local(pair.master.data), local(pair.parameter.data)
            low = target.dtype in (torch.bfloat16, torch.float16)
            if pair.master.grad is None or source.device != HOST or not low or not source.is_contiguous():
                continue
            if target.device != HOST and for_devices:
                targets[pair.master] = torch.empty_like(source, dtype=target.dtype, pin_memory=self._side is not None)
            elif target.device == HOST and target.is_contiguous():
                targets[pair.master] = target
        return targets


def _add(pair: Pair, gradient: Tensor) -> None:
    """Adds to the master's gradient. gradient: of this rank's part, on the master's device."""
    if pair.master.grad is not None:
        local(pair.master.grad).add_(gradient)
        return
    kept = pair.sums if pair.sums is not None else torch.empty_like(pair.master.data)
    local(kept).copy_(gradient)
    pair.master.grad = kept
    if pair.on_host:  # keep the memory: the system would map new pages each time
        pair.sums = kept


def open_disk(zero: Zero, aio: Aio, trains: bool) -> StateOnDisk | None:
    """The files of this rank for what goes to disks: masters and optimizer state if it `trains`, and parameters.

    Raises StorageError.
    """
    optimizer = zero.offload_optimizer if trains else None
    weights = zero.offload_param.nvme_path if zero.offload_param and zero.parameters_on_disk else None
    state = optimizer.nvme_path if optimizer and optimizer.device == "nvme" else None
    if weights is None and state is None:
        return None
    return_freed_memory()
    requests = min(aio.queue_depth * aio.intra_op_parallelism, _MOST_REQUESTS)
    folders = [folder for folder in dict.fromkeys((weights, state)) if folder is not None]
    files = {folder: ScratchFile(folder, block_size=aio.block_size, requests=requests) for folder in folders}
    state_file = files[state] if state is not None else None
    # Masters that are not the parameters themselves are beside the optimizer's state.
    masters_file = state_file if zero.offload != "param" else files[weights] if weights is not None else None
    return StateOnDisk(masters_file, state_file, optimizer.buffer_count if optimizer else DISK_BUFFERS)


def use_cores(device: torch.device) -> None:
    """Lets an offloaded optimizer on the host use this rank's share of the CPU cores, if the rank trains on a GPU.

    torchrun gives each rank a single thread (OMP_NUM_THREADS=1). Any other number of threads was chosen by the user and
    is kept.
    """
    if device.type != "cuda" or torch.get_num_threads() > 1 or not hasattr(os, "sched_getaffinity"):
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def choose_host(parameters: Mapping[str, nn.Parameter], ratio: float) -> set[str]:
    """Names of the parameters whose masters go to the host, for a share (`ratio`) of all elements. `planning` uses the
    same rule."""
    names = list(parameters)
    return {names[number] for number in choose_share([p.numel() for p in parameters.values()], ratio)}
