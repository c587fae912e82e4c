"""The sections of number formats in the typed job (`dsjob.contract.spec`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NewType

Dtype = Literal["fp32", "bf16", "fp16"]
KeptBuffers = NewType("KeptBuffers", object)  # "auto", or patterns of names
DtypeName = Literal[
    "bfloat16",
    "bf16",
    "torch.bfloat16",
    "float16",
    "fp16",
    "half",
    "torch.float16",
    "torch.half",
    "float32",
    "fp32",
    "float",
    "torch.float32",
    "torch.float",
]


@dataclass(frozen=True, slots=True)
class Bf16:
    enabled: bool
    check_grad_overflow: bool
    bf16_master_weights_and_grads: bool
    bf16_optimizer_states: bool

    @property
    def low_masters(self) -> bool:
        """Whether masters and their gradients are bf16 too."""
        return self.enabled and self.bf16_master_weights_and_grads


@dataclass(frozen=True, slots=True)
class Fp16:
    enabled: bool
    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: float


@dataclass(frozen=True, slots=True)
class TorchAutocast:
    enabled: bool
    dtype: DtypeName | None
    lower_precision_safe_modules: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class DataTypes:
    grad_accum_dtype: Dtype | None
    buffer_dtype: Dtype | None
    keep_in_fp32_modules: KeptBuffers
