"""`deepspeed.accelerator`: the device of this machine, with the methods of DeepSpeed's accelerators."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names


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

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use on the GPU; 0 on the CPU, where torch does not count them."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of the bytes in use on the GPU; 0 on the CPU."""
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Resets the peak of the bytes in use."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """`tensor` in page-locked memory; unchanged if there is no GPU to copy it to."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self._name

    def __getattr__(self, name: str) -> Any:
        if self._name == "cpu" and not hasattr(self._module, name):
            return getattr(torch, name)  # get_rng_state, FloatTensor and so on
        return getattr(self._module, name)


def is_current_accelerator_supported() -> bool:
    """Whether DeepSpeed supports this kind of device: it does all that dsjob uses."""
    return True


@cache
def get_accelerator() -> Accelerator:
    """The accelerator of this machine."""
    return Accelerator()


__getattr__ = _explain_names(__name__)
