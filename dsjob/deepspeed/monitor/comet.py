"""`deepspeed.monitor.comet`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.monitor.monitor import OneMonitor


class CometMonitor(OneMonitor):
    """Comet, with the section `comet`."""

    key = "comet"


__getattr__ = _explain_names(__name__)
