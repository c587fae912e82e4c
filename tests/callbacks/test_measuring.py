"""Callbacks that measure a run: learning rates, times, memory, floating-point operations, traces."""

from __future__ import annotations

import gzip
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from simulated_cuda import find_device
from simulated_cuda.build import build, find_obstacle
from small_jobs import make_document, run

from dsjob.callbacks import Flops, Profiler, StopAfter
from dsjob.errors import ContractError
from dsjob.ranks.mesh import World

NAMES = ("LearningRates", "GradientNorms", "WallClock", "MemoryUse", "Flops", "Profiler")
PLAIN = {"_target_": "small_jobs.Net", "dropout": 0.0}
WEIGHTS = 8 * 16 + 16 + 16 + 1  # of Net


def train(world: World | None, folder: Path, callback: dict[str, Any] | None, **sections: Any) -> list[dict[str, Any]]:
    """The records of a job with one callback of dsjob."""
    callbacks = {"it": {**callback, "_target_": f"dsjob.callbacks.{callback['_target_']}"}} if callback else {}
    run(make_document(folder, callbacks=callbacks, **{"model": PLAIN, **sections}), world)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_on_ranks(world: World, folder: Path, callback: dict[str, Any], sections: dict[str, Any]) -> Any:
    return train(world, folder, callback, **sections)


def test_learning_rates_of_groups(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}, "param_groups": {"biases": {"match": "*bias", "lr": 0.02}}}
    records = train(None, tmp_path, {"_target_": "LearningRates"}, optimizer=optimizer, scheduler=None)
    assert {(each["lr/rest"], each["lr/biases"], each["lr"]) for each in records} == {(0.01, 0.02, 0.01)}


def test_the_time_of_parts_adds_up(tmp_path: Path) -> None:
    data = {name: {"_target_": "measured.SlowData"} for name in ("train", "eval")}
    given = {"data": data, "trainer": {"eval_every": 4, "log_every": 4}, "checkpoint": {"every": 4}}
    with redirect_stdout(io.StringIO()) as printed:
        records = train(None, tmp_path, {"_target_": "WallClock"}, **given)
    first, second = (each for each in records if "loss" in each)
    assert 16 < first["time/data_ms"] < 200
    assert "time/save_ms" not in first
    for part in ("data", "forward", "backward", "step", "evaluation", "save"):
        assert second[f"time/{part}_ms"] > 0
    shares = [value for name, value in second.items() if name.endswith("_share")]
    assert sum(shares) == pytest.approx(1)
    assert second["time/evaluation_ms"] > 80  # 40 samples
    assert second["time/data_share"] > second["time/step_share"]
    (line,) = (line for line in printed.getvalue().splitlines() if line.startswith("time"))
    assert "save" in line


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 3)])
@pytest.mark.full("2-0")
def test_memory_is_that_of_the_tensors(tmp_path: Path, ranks: int, stage: int) -> None:
    model = {"_target_": "small_jobs.Net", "dropout": 0.0}
    sections = {"model": model, "zero_optimization": {"stage": stage}}
    record = run_ranks(train_on_ranks, ranks, tmp_path, {"_target_": "MemoryUse"}, sections)[0][-1]
    found = {name[7:-4]: value * 2**30 for name, value in record.items() if name.startswith("memory/")}
    # On rank 0 of two: 8 of 16 rows, 1 of 1 row.
    own = 8 * 8 + 8 + 16 + 1 + (7 if stage else 0) if (ranks, stage) == (2, 3) else WEIGHTS
    batch = 8 // ranks
    assert found["gradients"] == pytest.approx(4 * own, abs=70)
    assert found["weights"] == pytest.approx(4 * own, abs=70)
    assert found["optimizer"] == pytest.approx(2 * 4 * own + 4 * 4, abs=140)
    # The input, the result of relu, and what is squared.
    assert found["activations"] == 4 * batch * (8 + 16 + 1)
    assert found["peak"] > 50 * 2**20  # of the process


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_operations_are_those_of_a_formula(tmp_path: Path, ranks: int, stage: int) -> None:
    sections = {"zero_optimization": {"stage": stage}, "trainer": {"grad_accum": 2}}
    callback = {"_target_": "Flops", "peak_tflops": 0.5}
    records = run_ranks(train_on_ranks, ranks, tmp_path, callback, sections)[0]
    # Multiplications and additions of a sample: both layers forward, their weights' gradients, out's input.
    of_a_sample = 2 * (8 * 16 + 16) * 2 + 2 * 16
    assert "tflops" not in records[0]
    for record in records[1:]:
        assert record["tflops"] == pytest.approx(of_a_sample * record["samples_per_second"] / ranks / 1e12)
        assert record["mfu"] == pytest.approx(record["tflops"] / 0.5)
    table = (tmp_path / "flops.txt").read_text()
    assert "aten.addmm" in table
    assert "FSDP" not in table  # the model's own class, also where it is sharded


def test_operations_may_follow_from_the_number_of_parameters(tmp_path: Path) -> None:
    record = train(None, tmp_path, {"_target_": "Flops", "by": "parameters"})[0]
    assert record["tflops"] == pytest.approx(6 * WEIGHTS * record["samples_per_second"] / 1e12)
    assert "mfu" not in record


def test_a_trace_of_chosen_steps_on_each_rank(tmp_path: Path) -> None:
    callback = {"_target_": "Profiler", "wait": 2, "warmup": 1, "active": 2, "repeat": 1}
    run_ranks(train_on_ranks, 2, tmp_path, callback, {})
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {f"rank-0000{rank}-step-00000005.{end}" for rank in (0, 1) for end in ("txt", "json.gz")}
    with gzip.open(tmp_path / "profile/rank-00000-step-00000005.json.gz") as file:
        events = json.load(file)["traceEvents"]
    labels = [each["name"] for each in events if each.get("name") in ("forward", "backward", "step")]
    assert sorted(labels) == sorted(["forward", "backward", "step"] * 2)
    assert "aten::addmm" in (tmp_path / "profile/rank-00000-step-00000005.txt").read_text()


def test_a_profiler_that_is_at_work_when_a_run_fails_does_not_hinder_the_next(tmp_path: Path) -> None:
    callback = {"_target_": "Profiler", "wait": 0, "warmup": 1, "active": 7}
    unstable = {"model": {"_target_": "unstable.Unstable"}}
    with pytest.raises(Exception, match="nan"):
        train(None, tmp_path / "failed", callback, **unstable)
    train(None, tmp_path / "next", callback)
    assert len(list((tmp_path / "next/profile").iterdir())) == 2


def test_measuring_changes_nothing(tmp_path: Path) -> None:
    callbacks = {name: {"_target_": f"dsjob.callbacks.{name}"} for name in NAMES}
    sections = {"gradient_clipping": 0.1, "model": {"_target_": "small_jobs.Net"}}
    plain = run(make_document(tmp_path / "plain", **sections))
    assert run(make_document(tmp_path / "measured", **{**sections, "callbacks": callbacks})) == plain


def test_a_callback_may_not_replace_a_value_of_a_record(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"Returns.on_record returned 'loss', which"):
        run(make_document(tmp_path, callbacks={"mine": {"_target_": "measured.Returns"}}))


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Flops, {"by": "guessing"}, "by is 'guessing'"),
        (Flops, {"step": 0}, "step is 0"),
        (Profiler, {"active": 0}, "active 0"),
        (StopAfter, {"steps": 0}, "steps is 0"),
    ],
)
def test_arguments_are_checked(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        kind(**arguments)


class TimedEvent:
    """An event of the simulated device, which has no clock."""

    def __init__(self, enable_timing: bool) -> None:
        self.event = torch.Event(device="cuda")
        assert enable_timing
        self.record, self.query, self.synchronize = self.event.record, self.event.query, self.event.synchronize

    def elapsed_time(self, other: TimedEvent) -> float:
        return 2.0


def count_waits(world: World, folder: Path, names: tuple[str, ...]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    device = find_device()
    assert device is not None
    device.take_waits()
    torch.cuda.Event = TimedEvent  # type: ignore[misc,assignment]
    callbacks = {name: {"_target_": f"dsjob.callbacks.{name}"} for name in names}
    data = {"train": {"_target_": "small_jobs.Data"}, "num_workers": 0, "pin_memory": False}
    document = make_document(folder, callbacks=callbacks, model=PLAIN, data=data, trainer={"log_every": 8})
    run(document, world)
    return device.take_waits(), [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")
def test_on_a_device_the_host_waits_no_more_often(tmp_path: Path) -> None:
    ((plain, _),) = run_ranks(count_waits, 1, tmp_path / "plain", (), library=build())
    ((timed, records),) = run_ranks(count_waits, 1, tmp_path / "timed", ("WallClock",), library=build())
    assert records[0]["time/forward_ms"] == pytest.approx(2.0)
    assert timed == plain
