"""`deepspeed.monitor`: monitors that a program makes from the sections of a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsjob.deepspeed.monitor.config import DeepSpeedMonitorConfig
from dsjob.deepspeed.monitor.csv_monitor import csvMonitor
from dsjob.deepspeed.monitor.monitor import MonitorMaster
from dsjob.deepspeed.monitor.wandb import WandbMonitor
from dsjob.deepspeed.runtime.config import DeepSpeedConfig
from dsjob.errors import ConfigError

EVENTS = [("loss", 0.5, 1), ("loss", 0.25, 2)]


def test_monitors_of_a_config_write_to_its_folder(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "one"}
    config = DeepSpeedConfig({"train_batch_size": 2, "csv_monitor": section}).monitor_config
    one = csvMonitor(config.csv_monitor)
    assert (one.enabled, one.job_name, one.output_path) == (True, "one", str(tmp_path))
    one.write_events(EVENTS[:1])
    assert config.enabled
    MonitorMaster(config).write_events(EVENTS[1:])
    assert (tmp_path / "one" / "loss.csv").read_bytes() == b"step,loss\r\n1,0.5\r\n2,0.25\r\n"


def test_defaults_are_off_and_wrong_values_are_errors() -> None:
    config = DeepSpeedMonitorConfig()
    assert not config.enabled
    assert not MonitorMaster(config).enabled
    monitor = WandbMonitor(config.wandb)
    assert (monitor.enabled, monitor.project, monitor.group) == (False, "deepspeed", None)
    monitor.write_events(EVENTS)  # to nobody
    with pytest.raises(AttributeError, match="wandb has no 'rank_of'"):
        _ = monitor.rank_of
    with pytest.raises(ConfigError, match=r"csv_monitor\.enabled: must be true or false"):
        DeepSpeedMonitorConfig(csv_monitor={"enabled": "yes"})
