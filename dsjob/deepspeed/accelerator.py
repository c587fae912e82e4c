"""`deepspeed.accelerator`: the device of this machine by the calls of DeepSpeed's accelerators."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch


class Accelerator:
    """The GPU where there is one, else the CPU; what it lacks is looked up in torch.cuda, or in torch.cpu and torch."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._module = torch.get_device_module(self._name)

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda` or `cpu`, with an index where one is given."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """What to pass to `.to(...)` for this process."""
        return self.device_name(torch.cuda.current_device() if self._name == "cuda" else None)

    def current_device(self) -> int:
        """The number of this process's device; on the CPU its rank on the machine."""
        return torch.cuda.current_device() if self._name == "cuda" else int(os.environ.get("LOCAL_RANK", "0"))

    def device(self, device_index: int | None = None) -> Any:
        """The device as a context."""
        return torch.cuda.device(device_index) if self._name == "cuda" else torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Chooses this process's device."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """Devices of this machine; on the CPU the ranks that were started on it, else its cores."""
        if self._name == "cuda":
            return torch.cuda.device_count()
        started = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
        return int(started) if started else os.cpu_count() or 1

    def is_available(self) -> bool:
        """Whether there is something to compute on."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for the device."""
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether calls return when they are done."""
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        """The backend of collectives."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 can be computed in."""
        return torch.cuda.is_bf16_supported() if self._name == "cuda" else True

    def is_fp16_supported(self) -> bool:
        """Whether float16 can be computed in: on the CPU too, slowly."""
        return True

    def preferred_dtype(self) -> torch.dtype:
        """The half precision to prefer."""
        return torch.bfloat16 if self.is_bf16_supported() else torch.float16

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes of models."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        """dsjob has no kernels in Triton."""
        return False

    def manual_seed(self, seed: int) -> None:
        """Seeds this device's generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """Gives memory back that is not in use."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use on the device; 0 on the CPU, which does not count."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes that were in use."""
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forgets the most."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """`tensor` in page-locked memory, where there is a GPU to copy it to."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.device.type == self._name

    def __getattr__(self, name: str) -> Any:
        if self._name == "cpu" and not hasattr(self._module, name):
            return getattr(torch, name)  # get_rng_state, FloatTensor and so on
        return getattr(self._module, name)


@cache
def get_accelerator() -> Accelerator:
    """This machine's."""
    return Accelerator()
