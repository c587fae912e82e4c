"""The sections `zero_optimization` and `aio` of the typed job (`spec`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class OffloadParam:
    device: Literal["none", "cpu", "nvme"]
    pin_memory: bool
    nvme_path: str | None
    buffer_count: int
    buffer_size: int
    max_in_cpu: int


@dataclass(frozen=True, slots=True)
class OffloadOptimizer:
    device: Literal["none", "cpu", "nvme"]
    pin_memory: bool
    ratio: float
    nvme_path: str | None
    buffer_count: int


@dataclass(frozen=True, slots=True)
class LeafModule:
    classes: Sequence[str]
    names: Sequence[str]
    name_suffixes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Zero:
    stage: int
    offload_param: OffloadParam | None
    offload_optimizer: OffloadOptimizer | None
    stage3_prefetch_bucket_size: int | None
    stage3_max_live_parameters: int | None
    zero_hpz_partition_size: int
    mics_shard_size: int
    stage3_gather_16bit_weights_on_model_save: bool
    leaf_module: LeafModule | None

    @property
    def offload(self) -> Literal["none", "optimizer", "param"]:
        """What is offloaded to the host: nothing; optimizer state and masters; or these and the parameters too, at
        stage 3."""
        if self.stage == 3 and self.offload_param is not None and self.offload_param.device != "none":
            return "param"
        return "optimizer" if self.offload_optimizer and self.offload_optimizer.device != "none" else "none"

    @property
    def parameters_on_disk(self) -> bool:
        """Whether the parameters are kept on a disk."""
        return self.offload == "param" and self.offload_param is not None and self.offload_param.device == "nvme"


@dataclass(frozen=True, slots=True)
class Aio:
    block_size: int  # bytes
    queue_depth: int
    intra_op_parallelism: int
