"""`deepspeed.runtime.zero.offload_config`: the words for where things lie."""

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """Where state is offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What `engine.offload_states` moves: see dsjob.residence."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
