"""`deepspeed.monitor.csv_monitor`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.monitor.monitor import OneMonitor


class csvMonitor(OneMonitor):  # noqa: N801  # DeepSpeed's name
    """CSV files, with the section `csv_monitor`."""

    key = "csv_monitor"


__getattr__ = _explain_names(__name__)
