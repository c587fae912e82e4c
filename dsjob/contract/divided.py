"""The sections `tensor_parallel` and `context_parallel` as typed values; part of `contract.spec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

DividingPlan = NewType("DividingPlan", object)  # "auto", or styles by patterns of module names


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """autotp_size: DeepSpeed's name of `size`."""

    size: int
    autotp_size: int
    plan: DividingPlan
    sequence_parallel: bool
    loss_parallel: bool

    @property
    def ranks(self) -> int:
        """The ranks among which layers are divided."""
        return max(self.size, self.autotp_size)


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """size: the ranks among which sequences are divided."""

    size: int
