"""Monitors in the config of a program: they receive what DeepSpeed 0.19.8 writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_config, make_deepspeed_engine, make_tokens
from ranks import run_ranks
from wandb_files import read_wandb

import dsjob
from dsjob.deepspeed.program_monitors import Monitor
from dsjob.errors import ConfigError, ConfigWarning, UsageError
from dsjob.ranks.mesh import World

RATES = {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 3, "warmup_type": "linear"}
CONFIG: dict[str, Any] = {
    "accumulation": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": RATES},
}
# Recorded from DeepSpeed 0.19.8 with this config, and the events of `train`.
RECORDED = {
    "Train_Samples_lr.csv": b"step,lr\r\n4,0.0\r\n8,0.03333333333333333\r\n12,0.06666666666666667\r\n",
    "eval_my_loss.csv": b"step,my loss\r\n7,0.5\r\n",
    "count.csv": b"step,count\r\n8,3\r\n",
}


def train(folder: Path, **config: Any) -> Any:
    """An engine after 3 steps of 4 samples, with monitors in `folder`."""
    place = {"enabled": True, "output_path": str(folder)}
    sections = {key: {**place, "job_name": key} for key in ("csv_monitor", "tensorboard")}
    engine = make_deepspeed_engine(0, **{**CONFIG, **sections, **config})
    for step in range(6):
        engine.backward(engine(*make_tokens(step, 2)))
        engine.step()
    engine.monitor.write_events([("eval/my loss", torch.tensor(0.5), 7), ("count", 3, 8)])
    return engine


def test_files_are_those_of_deepspeed(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path).monitor.enabled
    assert {path.name: path.read_bytes() for path in (tmp_path / "csv_monitor").iterdir()} == RECORDED
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    found = [(event.step, event.value) for event in reader.Scalars("Train/Samples/lr")]
    assert found == [(4, 0.0), (8, pytest.approx(1 / 30)), (12, pytest.approx(2 / 30))]
    assert [event.step for event in reader.Scalars("eval/my loss")] == [7]
    # A second run, or a second engine, adds to the files.
    train(tmp_path)
    lines = (tmp_path / "csv_monitor" / "Train_Samples_lr.csv").read_bytes()
    assert lines == RECORDED["Train_Samples_lr.csv"] + RECORDED["Train_Samples_lr.csv"].partition(b"\n")[2]


def test_the_loss_scale_is_written_in_fp16(tmp_path: Path) -> None:
    train(tmp_path, fp16={"enabled": True, "initial_scale_power": 3})
    lines = (tmp_path / "csv_monitor" / "Train_Samples_loss_scale.csv").read_text().splitlines()
    assert lines == ["step,loss_scale", "4,8.0", "8,8.0", "12,8.0"]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = {"enabled": True, "output_path": "", "job_name": "DeepSpeedJobName"}
    for rank in (1, 0):
        assert not list(tmp_path.iterdir())
        monitor = Monitor({"csv_monitor": section}, rank)
        assert monitor.enabled
        monitor.write_events([("a", 1.0, 1)])
    assert [path.name for path in tmp_path.iterdir()] == ["DeepSpeedJobName"]


def train_on_ranks(world: World, folder: Path) -> None:
    os.chdir(folder)
    train(folder, wandb={"enabled": True, "project": "mine"})
    if world.everyone.rank == 0:
        import wandb

        wandb.finish()  # as at the end of a program; a rank of tests ends at once


@pytest.mark.full
def test_of_several_ranks_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_ranks(train_on_ranks, 2, tmp_path)
    assert (tmp_path / "csv_monitor/Train_Samples_lr.csv").read_text().split()[1:] == [
        "8,0.0", "16,0.03333333333333333", "24,0.06666666666666667"
    ]  # fmt: skip
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [
        {i.key or i.nested_key[0]: json.loads(i.value_json) for i in r.history.item}
        for r in read_wandb(file)
        if r.HasField("history")
    ]
    rates = [(record["_step"], record["Train/Samples/lr"]) for record in records if "Train/Samples/lr" in record]
    assert rates == [(8, 0.0), (16, pytest.approx(1 / 30)), (24, pytest.approx(2 / 30))]


@pytest.mark.parametrize(
    "event", [("a", None, 1), ("a", torch.ones(2), 1), ("a", 1.0), 3, ("a", "1", 1), ("a", 1, None)]
)
def test_an_event_must_be_a_number_by_name(tmp_path: Path, event: Any) -> None:
    monitor = Monitor({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}}, 0)
    with pytest.raises(UsageError, match="write_events got"):
        monitor.write_events([event])


def test_a_monitor_that_fails_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").touch()
    monitor = Monitor({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "taken"}}, 0)
    monitor.write_events([("a", 1.0, 1)])
    (told,) = caplog.messages
    assert told.startswith("monitor csv_monitor failed, and receives no more values")


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsjob.monitors._is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"tensorboard.*not installed") as caught:
        make_deepspeed_engine(0, tensorboard={"enabled": True})
    assert caught.value.problems[0].hint == "pip install tensorboard"


def test_dsjobs_own_engine_has_neither_monitors_nor_breakdowns() -> None:
    config = make_config(0, csv_monitor={"enabled": True}, wall_clock_breakdown=True, memory_breakdown=False)
    with pytest.warns(ConfigWarning, match="csv_monitor: dsjob.deepspeed.initialize returns an engine that") as told:
        dsjob.initialize(model=torch.nn.Linear(2, 1), config=config)
    assert "wall_clock_breakdown: " in str(told[0].message)
    assert "memory_breakdown" not in str(told[0].message)
