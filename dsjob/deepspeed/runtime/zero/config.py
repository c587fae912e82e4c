"""`deepspeed.runtime.zero.config`: the ZeRO section of a config."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime.config import Section
from dsjob.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)


class ZeroStageEnum(IntEnum):
    """The ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig(Section):
    """`zero_optimization`."""

    path = ("zero_optimization",)
    parts = {  # noqa: RUF012
        "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    }

    def _take(self, values: Mapping[str, Any]) -> None:
        # As in DeepSpeed, the default of overlap_comm depends on the stage.
        super()._take({**values, "overlap_comm": values.get("overlap_comm", values["stage"] == 3)})


__getattr__ = _explain_names(__name__)
