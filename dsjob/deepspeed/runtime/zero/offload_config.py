"""`deepspeed.runtime.zero.offload_config`: the config sections on offloading, and their enums."""

from __future__ import annotations

from enum import StrEnum

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime.config import Section


class OffloadDeviceEnum(StrEnum):
    """Devices to offload to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What `engine.offload_states` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig(Section):
    """`zero_optimization.offload_param`."""

    path = ("zero_optimization", "offload_param")


class DeepSpeedZeroOffloadOptimizerConfig(Section):
    """`zero_optimization.offload_optimizer`."""

    path = ("zero_optimization", "offload_optimizer")

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with the step."""
        return bool(self.pipeline_read or self.pipeline_write)


__getattr__ = _explain_names(__name__)
