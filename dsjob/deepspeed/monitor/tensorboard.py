"""`deepspeed.monitor.tensorboard`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.monitor.monitor import OneMonitor


class TensorBoardMonitor(OneMonitor):
    """TensorBoard, with the section `tensorboard`."""

    key = "tensorboard"


__getattr__ = _explain_names(__name__)
