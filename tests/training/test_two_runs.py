"""Two runs in one folder at once: the newer one has it to itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from jobs import make_job, read_metrics
from programs import DSJOB, Program

LONG = {"train_batch": 8, "max_steps": 2000, "log_every": 1}


def wait_for_step(folder: Path, step: int, process: Program) -> None:
    end = time.monotonic() + 60
    while not (folder / "run/metrics.jsonl").exists() or max(read_metrics(folder / "run"), default=0) < step:
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_older_of_two_runs_ends_when_the_newer_has_begun(tmp_path: Path, nproc: int) -> None:
    make_job(tmp_path, trainer=LONG)
    older = Program([DSJOB, "cfg.json", f"launch.nproc={nproc}", "+data.train.pause=0.01"], cwd=tmp_path)
    wait_for_step(tmp_path, 5, older)
    newer = Program([DSJOB, "cfg.json", "trainer.max_steps=40", "+data.train.pause=0.005"], cwd=tmp_path)
    told = older.communicate(60)[1]
    assert older.returncode == 1, told
    assert "a newer run has begun in run; this one no longer writes there" in told
    assert "give each its own output.dir" in told
    assert newer.wait(60) == 0, newer.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    # Each step once: none of the older run's after those of the newer one.
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert json.loads((tmp_path / "run/resolved.json").read_text())["trainer"]["max_steps"] == 40
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["step"]) == ("done", 40)
