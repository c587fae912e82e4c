"""Measures what memory is used for."""

from __future__ import annotations

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

_GIB = 2**30
_KINDS = ("weights", "gradients", "optimizer", "activations", "peak")


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
        self._gradients: dict[str, int] = {}  # bytes, by model
        self._activations = 0
        self._due = True  # the next forward pass is measured

    def on_start(self, run: RunView) -> None:
        for name, engine in run.engines.items():
            engine.strategy.parts.watches.append(partial(self._watch, name, engine))

    def on_record(self, run: RunView, record: Mapping[str, float]) -> dict[str, float]:
        engines, device = list(run.engines.values()), run.engine.device
        cuda = device.type == "cuda"
        sizes = {
            "weights": sum(_measure(_list_weights(engine)) for engine in engines),
            "gradients": sum(self._gradients.values()),
            "optimizer": sum(_measure(_list_state(engine)) for engine in engines),
            "activations": self._activations,
            "peak": torch.cuda.max_memory_allocated(device) if cuda else 0,
        }
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        self._activations, self._due = 0, True
        # float64 [kinds]
        found = torch.tensor([float(sizes[kind]) for kind in _KINDS], dtype=torch.float64, device=device)
        if run.engine.world.everyone.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        kinds = _KINDS if cuda else _KINDS[:-1]
        return {f"memory/{kind}_gib": size / _GIB for kind, size in zip(kinds, found.tolist(), strict=False)}

    @contextmanager
    def _watch(self, name: str, engine: Engine, part: str) -> Iterator[None]:
        if part == "step":
            self._gradients[name] = _measure(each.grad for _, each in engine.strategy.shown() if each.grad is not None)
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
