"""The sections `tensor_parallel` and `context_parallel` as typed values; part of `contract.spec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType

DividingPlan = NewType("DividingPlan", object)  # "auto", or styles by patterns of module names
LayerSpecs = NewType("LayerSpecs", Sequence[Mapping[str, Any]])  # entries as they are in the document


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    """DeepSpeed's form of a plan."""

    use_default_specs: bool
    layer_specs: LayerSpecs
    lm_head_patterns: Sequence[str]
    strict_mode: bool


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """autotp_size: DeepSpeed's name of `size`."""

    size: int
    autotp_size: int
    plan: DividingPlan
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None
    partition_config: PartitionConfig | None
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
