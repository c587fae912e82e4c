"""A CUDA device that is simulated in the host's memory, so that what runs on GPUs alone is tried on machines without.

Tensors are on `cuda:N`, as far as torch and dsjob can tell. Kernels are the CPU's, so that numbers are those of a run
on the CPU. What differs from a CPU is simulated: streams and events, with NaN in what is read before it is there;
collectives that behave as NCCL's; page-locked memory; whether two streams use the same memory without an order; and
how often the host waits for the device. `install` changes torch for good: call it in a process of its own.

Not simulated: kernels run when they are called, so that a stream that reads too late, or the host overwriting
page-locked memory too early, goes unnoticed; what makes a kernel of a GPU's round differently.
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

BACKEND = "simulated_nccl"
_installed: list[Device] = []


def find_device() -> Device | None:
    """What `install` has given this process, if it has."""
    return _installed[0] if _installed else None


class Device:
    """The simulated device of this process. `waits`: how often the host has waited, by what for and by where."""

    def __init__(self, extension: ModuleType) -> None:
        self.extension = extension
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()
        self.hazards: list[str] = []
        extension.listen(self._hear)

    def _hear(self, what: str) -> None:
        if what.startswith("hazard: "):
            self.hazards.append(f"{what.removeprefix('hazard: ')} at {_find_caller()}")
        else:
            self.waits[what, _find_caller()] += 1

    def take_waits(self) -> dict[str, int]:
        """How often the host has waited since the last call, by what for."""
        totals: collections.Counter[str] = collections.Counter()
        for (what, _), count in self.waits.items():
            totals[what] += count
        self.waits.clear()
        return dict(totals)

    def take_hazards(self) -> list[str]:
        """What was found to be used without an order since the last call, and where."""
        taken, self.hazards = self.hazards, []
        return taken


def _find_caller() -> str:
    """The innermost line of dsjob's that is being run."""
    frame: FrameType | None = sys._getframe(1)
    places = []
    while frame is not None:
        path = frame.f_code.co_filename
        if f"{os.sep}dsjob{os.sep}" in path:
            places.append(f"{path.rpartition(f'{os.sep}dsjob{os.sep}')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places[:3]) or "the program"


def install(library: Any, count: int = 1) -> Device:
    """Gives this process `count` simulated devices, from what `build.build` has compiled."""
    from simulated_cuda.build import load

    extension = load(library)
    extension.set_device_count(count)
    _replace_cuda(extension, count)
    _replace_resizing(extension)
    _replace_nccl(extension)
    _installed.append(Device(extension))
    return _installed[0]


def _replace_cuda(extension: ModuleType, count: int) -> None:
    """torch.cuda's own functions, those that dsjob, FSDP2, DDP and torch's tools call."""

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        given = torch.device(device) if device is not None else None
        return extension.current_device() if given is None or given.index is None else given.index

    def make_stream(device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
        return torch.Stream(device=torch.device("cuda", index(device)), priority=priority)

    def current_stream(device: Any = None) -> torch.Stream:
        number = index(device)
        return torch.Stream(stream_id=extension.current_stream(number), device_index=number, device_type=1)

    def default_stream(device: Any = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=index(device), device_type=1)

    @contextmanager
    def stream(chosen: torch.Stream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before = extension.exchange_stream(chosen.device.index, chosen.stream_id)
        try:
            yield
        finally:
            extension.exchange_stream(chosen.device.index, before)

    @contextmanager
    def device(chosen: Any) -> Iterator[None]:
        before = extension.current_device()
        extension.set_device(index(chosen))
        try:
            yield
        finally:
            extension.set_device(before)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    replaced = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": nothing,
        "_lazy_call": nothing,
        "device_count": lambda: count,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(index(device)),
        "device": device,
        "device_of": lambda tensor: device(tensor.device if tensor.is_cuda else None),
        "Stream": make_stream,
        "Event": lambda *_, **__: torch.Event(device="cuda"),
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": stream,
        "synchronize": lambda device=None: extension.synchronize(),
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "empty_cache": nothing,
        # Random numbers of the device are drawn from the host's generator.
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)


def _replace_resizing(extension: ModuleType) -> None:
    """Storages are resized by torch's CUDA library: FSDP2 frees in this way what it has gathered."""
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        holder = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        extension.resize_storage(holder, size)
        return self

    torch.UntypedStorage.resize_ = resize_


def _replace_nccl(extension: ModuleType) -> None:
    """What asks for NCCL gets collectives that behave as its own."""

    def make(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        return extension.make_nccl(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(BACKEND, make, devices=["cuda"])
    join = distributed_c10d.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        join(backend.replace("nccl", BACKEND) if backend else backend, *args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
