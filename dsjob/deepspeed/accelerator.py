"""`deepspeed.accelerator`: the device of this machine, with the methods of DeepSpeed's accelerators."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.deepspeed.ops import op_builder
from dsjob.deepspeed.ops.op_builder import OpBuilder


class Accelerator:
    """The GPU if there is one, or else the CPU. Other attributes come from torch.cuda, or from torch.cpu and torch."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._module = torch.get_device_module(self._name)

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda`, `cuda:INDEX` or `cpu`."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """The device string of this process, for `.to(...)`."""
        return self.device_name(torch.cuda.current_device() if self._name == "cuda" else None)

    def current_device(self) -> int:
        """The index of this process's device; on the CPU, its local rank."""
        return torch.cuda.current_device() if self._name == "cuda" else int(os.environ.get("LOCAL_RANK", "0"))

    def device(self, device_index: int | None = None) -> Any:
        """The device as a context manager."""
        return torch.cuda.device(device_index) if self._name == "cuda" else torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Sets this process's device. Has no effect on the CPU."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """The number of GPUs. On the CPU: the number of ranks on this machine, or of its cores if that is unknown."""
        if self._name == "cuda":
            return torch.cuda.device_count()
        started = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
        return int(started) if started else os.cpu_count() or 1

    def is_available(self) -> bool:
        """Always True: there is at least a CPU."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits until the device has finished all queued work."""
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether the device executes calls synchronously."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that work is queued on by default."""
        return torch.cuda.default_stream(device_index) if self._name == "cuda" else torch.cpu.current_stream()

    def range_push(self, msg: str) -> None:
        """Begins a range with a name in Nsight's traces. Has no effect on the CPU."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """Ends the range that began last."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def lazy_call(self, callback: Callable[[], object]) -> None:
        """Calls a function."""
        callback()

    def communication_backend_name(self) -> str:
        """The backend for collectives: `nccl` or `gloo`."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether the device supports bfloat16."""
        return torch.cuda.is_bf16_supported() if self._name == "cuda" else True

    def is_fp16_supported(self) -> bool:
        """Always True. The CPU supports float16 too, slowly."""
        return True

    def preferred_dtype(self) -> torch.dtype:
        """The preferred half-precision dtype."""
        return torch.bfloat16 if self.is_bf16_supported() else torch.float16

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that models can have."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_fp64_supported(self) -> bool:
        """Always True."""
        return True

    def get_compile_backend(self) -> str:
        """The backend that `engine.compile` uses by default."""
        return "inductor"

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: MutableMapping[str, str], local_accelerator_ids: list[int]) -> None:
        """Sets these variables in `current_env`."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        """The class of a builder; None if dsjob does not have it."""
        found: type[OpBuilder] | None = getattr(op_builder, class_name, None)
        return found

    def create_op_builder(self, class_name: str) -> OpBuilder | None:
        """A builder; None if dsjob does not have it."""
        found = self.get_op_builder(class_name)
        return found() if found is not None else None

    def is_triton_supported(self) -> bool:
        """Always False: dsjob has no Triton kernels."""
        return False

    def random(self) -> Any:
        """torch's module of random generators, such as for `fork_rng`."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seeds the random generators of this process."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """Releases unused cached memory of the GPU."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def _measure(self, name: str, device_index: int | None) -> int:
        """What torch.cuda's function says of the GPU's memory; 0 on the CPU, where torch does not count it."""
        return int(getattr(torch.cuda, name)(device_index)) if self._name == "cuda" else 0

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use on the GPU; 0 on the CPU."""
        return self._measure("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of the bytes in use on the GPU; 0 on the CPU."""
        return self._measure("max_memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch holds on the GPU, in use or cached; 0 on the CPU."""
        return self._measure("memory_reserved", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The peak of the bytes that torch holds on the GPU; 0 on the CPU."""
        return self._measure("max_memory_reserved", device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """torch's statistics of the GPU's memory; none on the CPU."""
        return torch.cuda.memory_stats(device_index) if self._name == "cuda" else {}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Resets the peak of the bytes in use."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory."""
        if self._name == "cuda":
            return int(torch.cuda.mem_get_info(device_index)[1])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory that torch has not allocated; on the CPU, those that are free."""
        if self._name == "cuda":
            return self.total_memory(device_index) - self.memory_allocated(device_index)
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """`tensor` in page-locked memory; unchanged if there is no GPU to copy it to."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self._name

    def __getattr__(self, name: str) -> Any:
        for module in (self._module, torch) if self._name == "cpu" else (self._module,):
            if hasattr(module, name):
                return getattr(module, name)  # get_rng_state, FloatTensor and so on
        raise AttributeError(f"the accelerator {self._name} has no attribute {name!r} in dsjob")


def is_current_accelerator_supported() -> bool:
    """Whether DeepSpeed supports this kind of device: it does all that dsjob uses."""
    return True


@cache
def get_accelerator() -> Accelerator:
    """The accelerator of this machine."""
    return Accelerator()


__path__ = _stand_for(__name__, "real_accelerator")
__getattr__ = _explain_names(__name__)
