"""`deepspeed.monitor.monitor`: monitors that a program makes itself; `engine.monitor` has those of a config."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.monitor.config import DeepSpeedMonitorConfig
from dsjob.deepspeed.program_monitors import Monitor
from dsjob.deepspeed.runtime.config import Section


class MonitorMaster(Monitor):
    """Writes to all enabled monitors of `config.monitor_config`, on rank 0."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        sections = {key: vars(section) for key, section in vars(monitor_config).items() if isinstance(section, Section)}
        super().__init__(sections, dist.get_rank() if dist.is_initialized() else 0)


class OneMonitor(Monitor):
    """Writes to one monitor on rank 0, if its section enables it. Has the values of the section as attributes."""

    key: ClassVar[str]

    def __init__(self, config: Section) -> None:
        super().__init__({self.key: vars(config)}, dist.get_rank() if dist.is_initialized() else 0)
        self._section = config

    def __getattr__(self, name: str) -> Any:
        if name == "_section":
            raise AttributeError(name)
        return getattr(self._section, name)


__getattr__ = _explain_names(__name__)
