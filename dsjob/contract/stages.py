"""The section `pipeline` as a typed value; part of `contract.spec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

Stages = NewType("Stages", object)  # an integer, or "auto"

# `1f1b`, `gpipe`, `interleaved` or `zero-bubble`; or an object with `_target_`.
Order = NewType("Order", object)


@dataclass(frozen=True, slots=True)
class Pipeline:
    stages: Stages
    chunks: int
    partition: str
    schedule: Order
    micro_batches: int | None
    seed_layers: bool
    activation_checkpoint_interval: int

    @property
    def size(self) -> int:
        """The number of stages; 1 without a pipeline."""
        return self.stages if isinstance(self.stages, int) else 1
