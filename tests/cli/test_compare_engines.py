"""`dsjob compare-engines`: both engines in fresh processes, and what is said of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from jobs import dsjob, make_job

from dsjob.cli import main
from dsjob.cli.compare_engines import to_text
from dsjob.comparison import Side, find_largest_difference
from dsjob.errors import DocumentError, UsageError

SMALL = (
    "+recipe=quickstart",
    "model.layers=2",
    "model.width=32",
    "model.context=16",
    "data.train.context=16",
    "data.eval.context=16",
    "trainer.micro_batch=4",
    "~callbacks.sample",
    "~scheduler",
)
slow = pytest.mark.slow
installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install 'dsjob[deepspeed]'"
)


@slow
@installed
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_quickstart_has_the_same_losses_on_two_ranks(tmp_path: Path, stage: int) -> None:
    job = (*SMALL, f"zero_optimization.stage={stage}", "launch.nproc=2")
    done = dsjob("compare-engines", *job, "--steps", "4", "--tolerance", "1e-4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["agree"] is True
    assert found["largest_difference"] <= 1e-4
    for side in found["engines"].values():
        assert len(side["losses"]) == len(side["seconds"]) == 4
        assert side["losses"][-1] < side["losses"][0]
        assert min(side["seconds"]) > 0
        assert side["peak_bytes"] > 50e6  # the interpreter and torch alone
    assert list(tmp_path.iterdir()) == []


@slow
@installed
def test_losses_that_differ_end_with_1_and_what_fails_is_told(tmp_path: Path) -> None:
    make_job(tmp_path, bf16={"enabled": True})
    done = dsjob("compare-engines", "cfg.json", "--steps", "3", "--tolerance", "0", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "losses differ by more than 0" in done.stdout
    done = dsjob("compare-engines", "cfg.json", "model._target_=my_model.Crash", cwd=tmp_path)
    assert done.returncode == 1
    assert "engine dsjob: ValueError: shapes do not fit" in done.stderr


def test_the_table_has_each_step_and_what_it_takes() -> None:
    sides = {"dsjob": Side([4.0, 2.0], [9.0, 0.1], 2**20), "deepspeed": Side([4.0, 2.1], [9.0, 0.2], 2**21)}
    largest, step = find_largest_difference(sides)
    assert (largest, step) == (pytest.approx(0.05), 2)
    verdict = {"agree": False, "tolerance": 0.01, "largest_difference": largest, "at_step": step}
    lines = to_text(sides, verdict).splitlines()
    assert lines[2].split() == ["2", "2.000000", "2.100000", "5.0e-02"]
    assert lines[4:] == [
        "losses differ by more than 0.01: at most 5.0e-02, in step 2",
        "seconds a step (median)  dsjob 0.1000  deepspeed 0.2000  ratio 0.50",
        "peak memory of a rank    dsjob 1 MiB  deepspeed 2 MiB",
    ]


def test_a_loss_that_is_not_finite_differs() -> None:
    sides = {"dsjob": Side([1.0], [1.0], 1), "deepspeed": Side([float("nan")], [1.0], 1)}
    assert not find_largest_difference(sides)[0] <= 1.0


def test_what_deepspeed_does_not_do_is_told_before_anything_runs() -> None:
    with pytest.raises(SystemExit):
        main(["compare-engines", "--tolerance", "2", "x"])
    assert main(["compare-engines", *SMALL, "optimizer.type=Lamb"]) == DocumentError.exit_code


def test_ranks_of_somebody_else_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["compare-engines", *SMALL]) == UsageError.exit_code
    assert "starts its own ranks" in capsys.readouterr().err
