"""Measures what memory is used for."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsjob.callbacks.callback import Callback, RunView
from dsjob.engine.engine import Engine
from dsjob.optim.shards import local
from dsjob.torch_private import address_of, find_base

GIB = 2**30


class MemoryUse(Callback):
    """Adds to log records what a rank's memory is used for, in GiB, as `memory/KIND_gib`. Of several ranks, the largest
    values.

    weights: parameters, fp32 masters and buffers of all models, also those on the host. gradients: before
    the optimizer steps. optimizer: its state. activations: what the forward pass of one micro batch keeps for the
    backward pass. On CUDA, this is the growth of allocated memory during a forward pass, and `peak` is the most memory
    that was allocated since the last record. On the CPU, activations are counted from the tensors that autograd saves
    outside of recomputed blocks, in one forward pass per record, and `peak` is that of the process, as in the log
    records of every job.

    DeepSpeed's key `memory_breakdown` adds this callback.
    """

    def __init__(self) -> None:
        self._meter = MemoryMeter()

    def on_start(self, run: RunView) -> None:
        for engine in run.engines.values():
            self._meter.watch(engine)

    def on_record(self, run: RunView, record: Mapping[str, float]) -> dict[str, float]:
        device, sizes = run.engine.device, self._meter.read()
        if device.type == "cuda":
            sizes["peak"] = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        # float64 [kinds]
        found = torch.tensor([float(size) for size in sizes.values()], dtype=torch.float64, device=device)
        if run.engine.world.everyone.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return {f"memory/{kind}_gib": size / GIB for kind, size in zip(sizes, found.tolist(), strict=True)}


class MemoryMeter:
    """Measures what this rank's memory is used for by engines, in bytes. `MemoryUse` says what the kinds are."""

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        self._gradients: dict[int, int] = {}  # by number of the engine
        self._activations = 0
        self._due = True  # the next forward pass is measured

    def watch(self, engine: Engine) -> None:
        """Measures `engine` from now on."""
        engine.strategy.parts.watches.append(partial(self._watch, len(self._engines), engine))
        self._engines.append(engine)

    def read(self) -> dict[str, int]:
        """The bytes of weights, gradients, optimizer and activations. The next forward pass is measured again."""
        found = {
            "weights": sum(_measure(_list_weights(engine)) for engine in self._engines),
            "gradients": sum(self._gradients.values()),
            "optimizer": sum(_measure(_list_state(engine)) for engine in self._engines),
            "activations": self._activations,
        }
        self._activations, self._due = 0, True
        return found

    @contextmanager
    def _watch(self, number: int, engine: Engine, part: str) -> Iterator[None]:
        if part == "step":
            shown = (each.grad for _, each in engine.strategy.shown())
            self._gradients[number] = _measure(gradient for gradient in shown if gradient is not None)
        if part != "forward":
            yield
        elif engine.device.type == "cuda":
            before = torch.cuda.memory_allocated(engine.device)
            yield
            self._activations = max(self._activations, torch.cuda.memory_allocated(engine.device) - before)
        else:
            saved = _Saved(engine)
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack) if self._due else nullcontext():
                yield
            self._activations, self._due = max(self._activations, sum(saved.sizes.values())), False


def read_peak(device: torch.device) -> int:
    """The most bytes that this rank has used so far: tensors on its GPU, or the process on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes in `ru_maxrss`
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Saved:
    """Counts the storages that autograd saves, except those of parameters and buffers."""

    def __init__(self, engine: Engine) -> None:
        self._known = {address_of(local(each.detach())) for each in _list_weights(engine)}
        self.sizes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a saved tensor."""
        # At stage 3, whole parameters are gathered into storages of their own.
        if not isinstance(find_base(tensor), nn.Parameter) and address_of(tensor) not in self._known:
            self.sizes[address_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _list_weights(engine: Engine) -> Iterator[Tensor]:
    yield from (tensor for _, tensor in engine.strategy.shown())
    yield from engine.module.buffers()


def _list_state(engine: Engine) -> Iterator[Tensor]:
    states: Iterable[Mapping[str, Any]] = engine.optimizer.state.values() if engine.optimizer is not None else ()
    return (value for state in states for value in state.values() if isinstance(value, Tensor))


def _measure(tensors: Iterable[Tensor]) -> int:
    """The bytes of this rank's parts of tensors. Each storage counts once."""
    return sum({address_of(own): own.untyped_storage().nbytes() for own in map(_take_own, tensors)}.values())


def _take_own(tensor: Tensor) -> Tensor:
    return local(tensor.detach())
