"""Precision: the dtypes by name, those of a job, and casting of inputs.

Gradients accumulate in the compute dtype at stages 0 and 1 (at 1 in communication_data_type where given), as in
DeepSpeed, and in fp32 at stages 2 and 3, also on one rank. With `data_types.grad_accum_dtype: fp32`, a strategy that
cannot accumulate in fp32 reduces after each micro step and adds to the masters' gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsjob.contract.spec import Dtype, DtypeName, EngineSpec

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """`compute`: dtype of forward and backward; `reduce`: dtype in which gradients travel between ranks.

    `predivide`: what gradients are divided by before they are summed over the ranks; None: the number of ranks.
    `accumulate`: dtype that gradients of several micro steps are added up in; None: as the ZeRO stage has it.

    `autocast`: dtype that torch.autocast lowers operators to, and that the gradients of `safe` modules (classes by
    dotted name; None: torch's linear and convolution layers) travel in; None: no autocast.
    """

    compute: torch.dtype
    reduce: torch.dtype
    autocast: torch.dtype | None = None
    safe: Sequence[str] | None = None
    accumulate: torch.dtype | None = None
    predivide: float | None = None

    @classmethod
    def of(cls, spec: EngineSpec, device: torch.device) -> Precision:
        """As the job asks; gradients travel in the compute dtype unless communication_data_type says otherwise."""
        compute = torch.bfloat16 if spec.bf16.enabled else torch.float16 if spec.fp16.enabled else torch.float32
        named = spec.communication_data_type
        asked, summed, factor = spec.torch_autocast, spec.data_types.grad_accum_dtype, spec.gradient_predivide_factor
        return cls(
            compute=compute,
            reduce=DTYPES[named] if named else compute,
            autocast=_find_autocast(asked.dtype, device) if asked.enabled else None,
            safe=asked.lower_precision_safe_modules,
            predivide=None if spec.prescale_gradients or factor == 1 else factor,
            accumulate=DTYPES[summed] if summed else None,
        )

    @property
    def needs_scale(self) -> bool:
        """Whether gradients would underflow without a loss scale."""
        return torch.float16 in (self.compute, self.autocast)

    @property
    def name(self) -> str:
        """`fp32`, `bf16` or `fp16`: what the model computes in."""
        return name_dtype(self.compute)


def name_dtype(dtype: torch.dtype) -> str:
    """`fp32`, `bf16` or `fp16`."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def _find_autocast(name: DtypeName | None, device: torch.device) -> torch.dtype | None:
    """The dtype of a name, torch's choice for the device by default; None for fp32, which lowers nothing."""
    if name is None:
        return torch.get_autocast_dtype(device.type)
    word = name.removeprefix("torch.")
    dtype = DTYPES[word] if word in DTYPES else getattr(torch, word)
    return None if dtype == torch.float32 else dtype


@contextmanager
def matmul_precision(wanted: Literal["highest", "high", "medium"] | None) -> Iterator[None]:
    """Computes matrix products of fp32 tensors as precisely as `wanted` within the block; None changes nothing."""
    if wanted is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it (in dicts, lists and tuples) as `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value
