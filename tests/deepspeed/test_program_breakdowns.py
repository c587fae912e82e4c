"""Breakdowns of time, memory and operations in the config of a program are printed on rank 0."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from engines import make_deepspeed_engine, make_tokens
from net import Net
from ranks import run_ranks

from dsjob.ranks.mesh import World

STEPS = 4


def train(stage: int = 0, **config: Any) -> Any:
    """An engine after 4 steps of 2 micro batches."""
    engine = make_deepspeed_engine(stage, accumulation=2, **config)
    for step in range(2 * STEPS):
        engine.backward(engine(*make_tokens(step, 2)))
        engine.step()
    return engine


def read_line(line: str) -> dict[str, float]:
    return {name: float(value) for name, value in (part.split(": ") for part in line.split(" | ")[1:])}


def test_times_are_means_of_the_steps_since_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "times"}
    engine = train(wall_clock_breakdown=True, steps_per_print=2, csv_monitor=csv)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["time (ms)"] * 2
    times = read_line(lines[-1])
    assert list(times) == ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
    assert all(times[name] > 0 for name in ("fwd", "bwd_inner", "step"))
    parts = engine.get_wall_clock_timers()
    assert 0.5 * parts["bwd"] < parts["bwd_inner"] + parts["bwd_allreduce"] <= parts["bwd"]
    assert parts == pytest.approx(times, abs=0.01)
    assert (tmp_path / "times/Train_Samples_elapsed_time_ms_backward_inner.csv").exists()
    written = (tmp_path / "times/Train_Samples_elapsed_time_ms_forward.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in written[1:]] == ["8", "16"]  # samples
    assert float(written[2].split(",")[1]) == pytest.approx(times["fwd"], abs=0.01)


def test_without_steps_per_print_each_step_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    train(memory_breakdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == STEPS
    assert list(read_line(lines[0])) == ["weights", "gradients", "optimizer", "activations", "peak"]


def test_the_profile_is_that_of_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "flops.txt"
    section = {"enabled": True, "profile_step": 2, "output_file": str(file)}
    train(flops_profiler=section, steps_per_print=100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["time (ms)", f"flops profile: {file}"]
    text = file.read_text()
    assert text.startswith("flops profile of step 3, rank 0\n")
    assert f"{sum(p.numel() for p in Net().parameters()):,}" in text
    assert re.search(r"forward +[\d,]+ operations, [\d.e-]+ TFLOP/s in [\d.]+ ms\n", text)
    assert "aten." in text


def print_on_ranks(world: World, stage: int, folder: Path) -> None:
    import sys

    sys.stdout = (folder / f"{world.everyone.rank}.txt").open("w")
    section = {"enabled": True, "profile_step": 0, "detailed": False}
    train(stage, wall_clock_breakdown=True, memory_breakdown=True, flops_profiler=section, steps_per_print=4)
    sys.stdout.close()


@pytest.mark.parametrize("stage", [0, pytest.param(3)])
def test_only_rank_0_prints(tmp_path: Path, stage: int) -> None:
    run_ranks(print_on_ranks, 2, stage, tmp_path)
    assert (tmp_path / "1.txt").read_text() == ""
    lines = (tmp_path / "0.txt").read_text().splitlines()
    titles = [line.split(" | ")[0] for line in lines if not line.startswith("  ")]
    both = ["time (ms)", "memory (GiB)"]
    assert titles == [*both, "flops profile of step 1, rank 0", *both]
    assert "  ranks       2, 2 of them data-parallel" in lines
    assert not any("aten." in line for line in lines)
