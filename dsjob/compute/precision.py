"""Precision: dtypes by name, the dtypes of a job, and casting of inputs.

As in DeepSpeed, gradients accumulate in the compute dtype at stages 0 and 1 (at stage 1 in communication_data_type, if
given), and in fp32 at stages 2 and 3, even on one rank. With `data_types.grad_accum_dtype: fp32`, a strategy that
cannot accumulate in fp32 reduces after each micro step, and adds to the gradients of the masters. With a lower dtype,
the reduced gradients are kept in it between micro steps (`parallel.held_sums`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsjob.contract.precisions import Dtype, DtypeName
from dsjob.contract.spec import EngineSpec

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a job.

    compute: of the forward and backward pass. reduce: of gradients that are communicated between ranks. predivide: what
    gradients are divided by before they are summed over ranks; None: the number of ranks. accumulate: of gradients that
    are added up over micro steps; None: the default of the ZeRO stage.

    master: of the weights that the optimizer steps, and of their gradients. state: of the optimizer's state.

    autocast: the lower precision of torch.autocast; None: no autocast. Gradients of `safe` modules are communicated in
    it. safe: classes by dotted name; None: torch's linear and convolution layers.
    """

    compute: torch.dtype
    reduce: torch.dtype
    autocast: torch.dtype | None = None
    safe: Sequence[str] | None = None
    accumulate: torch.dtype | None = None
    predivide: float | None = None
    master: torch.dtype = torch.float32
    state: torch.dtype = torch.float32

    @classmethod
    def of(cls, spec: EngineSpec, device: torch.device) -> Precision:
        """The job's precision. Gradients are communicated in communication_data_type, or else in the compute dtype."""
        # With autocast, neither section is enabled: the model stays fp32, and operators choose.
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
            master=torch.bfloat16 if spec.bf16.low_masters else torch.float32,
            state=torch.bfloat16 if spec.bf16.low_masters and spec.bf16.bf16_optimizer_states else torch.float32,
        )

    def held(self, stage: int) -> torch.dtype | None:
        """The lower precision in which gradients are kept between micro steps, if it is not that in which a strategy
        accumulates them by itself."""
        own = self.compute if stage == 1 else self.master
        return None if stage == 0 or self.accumulate in (None, torch.float32, own) else self.accumulate

    @property
    def needs_scale(self) -> bool:
        """Whether gradients would underflow without a loss scale."""
        return torch.float16 in (self.compute, self.autocast)

    @property
    def name(self) -> str:
        """`fp32`, `bf16` or `fp16`: the compute dtype."""
        return name_dtype(self.compute)


def name_dtype(dtype: torch.dtype) -> str:
    """`fp32`, `bf16` or `fp16`."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def _find_autocast(name: DtypeName | None, device: torch.device) -> torch.dtype | None:
    """The dtype for a name; by default, torch's choice for the device. None for fp32, which needs no autocast."""
    if name is None:
        return torch.get_autocast_dtype(device.type)
    word = name.removeprefix("torch.")
    dtype = DTYPES[word] if word in DTYPES else getattr(torch, word)
    return None if dtype == torch.float32 else dtype


@contextmanager
def matmul_precision(wanted: Literal["highest", "high", "medium"] | None) -> Iterator[None]:
    """Sets the precision of fp32 matrix products within the block. None changes nothing."""
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
    """`value` with all its floating-point tensors (in dicts, lists and tuples) cast to `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    # A namedtuple takes its items as separate arguments, unlike a plain tuple.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value
