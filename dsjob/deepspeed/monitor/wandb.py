"""`deepspeed.monitor.wandb`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.monitor.monitor import OneMonitor


class WandbMonitor(OneMonitor):
    """Weights & Biases, with the section `wandb`."""

    key = "wandb"


__getattr__ = _explain_names(__name__)
