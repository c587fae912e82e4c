"""`deepspeed.monitor.config`: the sections of a config on monitors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime.config import Section


class TensorBoardConfig(Section):
    """`tensorboard`."""

    path = ("tensorboard",)


class WandbConfig(Section):
    """`wandb`."""

    path = ("wandb",)


class CSVConfig(Section):
    """`csv_monitor`."""

    path = ("csv_monitor",)


class CometConfig(Section):
    """`comet`."""

    path = ("comet",)


class DeepSpeedMonitorConfig:
    """All of them, and whether any is enabled. Raises ConfigError for invalid values."""

    def __init__(self, **given: Mapping[str, Any]) -> None:
        self.tensorboard = TensorBoardConfig(**given.get("tensorboard", {}))
        self.wandb = WandbConfig(**given.get("wandb", {}))
        self.csv_monitor = CSVConfig(**given.get("csv_monitor", {}))
        self.comet = CometConfig(**given.get("comet", {}))
        self.enabled = any(section.enabled for section in vars(self).values())


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of a config."""
    names = ("tensorboard", "wandb", "csv_monitor", "comet")
    return DeepSpeedMonitorConfig(**{name: param_dict.get(name) or {} for name in names})


__getattr__ = _explain_names(__name__)
