"""`dsjob compare-engines`: both engines in fresh processes, and what is said of them."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from pathlib import Path

import pytest
from job_documents import make_job as make_document
from job_documents import resolve
from jobs import dsjob, make_job
from programs import DSJOB, Program, clean_env, find_processes

from dsjob.cli import main
from dsjob.cli.compare_engines import to_json, to_text
from dsjob.contract.spec import JobSpec, view
from dsjob.errors import DocumentError, UsageError
from dsjob.launch.comparison import Side, _cut, find_largest_difference

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
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install '.[deepspeed]'"
)


@slow
@pytest.mark.full
@installed
def test_quickstart_has_the_same_losses_on_two_ranks(tmp_path: Path) -> None:
    job = (*SMALL, "zero_optimization.stage=2", "launch.nproc=2")  # other stages: test_deepspeed_driven
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
    done = dsjob("compare-engines", "cfg.json", "--steps", "3", "--tolerance", "0", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["agree"] is False
    assert 0 < found["largest_difference"] <= 3e-2  # bf16
    assert all(len(side["losses"]) == len(side["seconds"]) == 3 for side in found["engines"].values())
    done = dsjob("compare-engines", "cfg.json", "model._target_=my_model.Crash", cwd=tmp_path)
    assert done.returncode == 1
    assert "engine dsjob: ValueError: shapes do not fit" in done.stderr


@installed
@pytest.mark.full
def test_a_side_hides_what_it_has_read_and_takes_no_module_of_python_from_the_current_folder(tmp_path: Path) -> None:
    make_job(tmp_path, model={"_target_": "refusing.Model", "token": "${oc.env:DSJOB_TOKEN}"})
    (tmp_path / "refusing.py").write_text(
        "import os, sys\nfrom dsjob.errors import UsageError\n\n"
        "def Model(token):\n    print('was given', token, os.environ.get('PYTHONSAFEPATH'), file=sys.stderr)\n"
        "    raise UsageError(f'refused {token}', hint=f'not {token}')\n"
    )
    (tmp_path / "multiprocessing.py").write_text("open('ran', 'w')\n")
    done = dsjob("compare-engines", "cfg.json", cwd=tmp_path, fresh=True, DSJOB_TOKEN="hunter2hunter2")
    assert done.returncode != 0
    assert "was given *** None" in done.stderr
    assert "refused ***" in done.stderr
    assert "hunter2" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_table_has_each_step_and_what_it_takes() -> None:
    sides = {"dsjob": Side([4.0, 2.0], [9.0, 0.1], 2**20), "deepspeed": Side([4.0, 2.1], [9.0, 0.2], 2**21)}
    largest, step = find_largest_difference(sides)
    assert (largest, step) == (pytest.approx(0.05), 2)
    verdict = {"agree": False, "tolerance": 0.01, "largest_difference": largest, "at_step": step}
    lines = to_text(sides, verdict).splitlines()
    assert lines[2].split() == ["2", "2.000000", "2.100000", "5.0e-02"]
    assert lines[4:] == [
        "losses differ by more than 0.01: at most 5.0e-02, in step 2",
        "seconds per step (median)  dsjob 0.1000  deepspeed 0.2000  ratio 0.50",
        "peak memory per rank       dsjob 1 MiB  deepspeed 2 MiB",
    ]


def test_a_loss_that_is_not_finite_differs() -> None:
    for place in range(3):
        losses = [1.0, 2.0, 3.0]
        losses[place] = math.nan
        sides = {"dsjob": Side([1.0, 2.0, 3.0], [1.0], 1), "deepspeed": Side(losses, [1.0], 1)}
        largest, step = find_largest_difference(sides)
        assert (largest, step) == (math.inf, place + 1)
        told = json.loads(to_json(sides, {"largest_difference": largest}), parse_constant=pytest.fail)
        assert told["largest_difference"] is told["engines"]["deepspeed"]["losses"][place] is None


def test_nothing_is_saved_whatever_the_job_says() -> None:
    periods = {"every": 2, "every_minutes": 1, "every_epochs": 0.5, "best": {}, "async": True, "dir": "kept"}
    data = make_document()["data"]
    document = resolve(make_document(checkpoint=periods, data={**data, "eval": data["train"]}))
    found = view(JobSpec, _cut(document, "dsjob", 3, "side")).checkpoint
    asked = (found.every.amount, found.every_minutes, found.every_epochs, found.best, found.dir)
    assert asked == (0, None, None, None, None)
    assert not any((found.at_end, found.on_signal, found.async_))


def test_deepspeed_is_looked_for_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("dsjob.launch.comparison._run_side", pytest.fail)
    assert main(["compare-engines", *SMALL]) == UsageError.exit_code
    assert "the package deepspeed, which is not installed" in capsys.readouterr().err


@slow
@installed
def test_a_signal_ends_the_side_that_is_training_and_leaves_nothing(tmp_path: Path) -> None:
    make_job(tmp_path, launch={"nproc": 2})
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [DSJOB, "compare-engines", "cfg.json", "+data.train.pause=0.05", "--steps", "100000"]
    process = Program(command, cwd=tmp_path, env=clean_env(TMPDIR=str(temporary)))
    try:
        until = time.monotonic() + 60
        while not any(file.stat().st_size for file in temporary.glob("dsjob-*/dsjob/metrics.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        process.terminate()
        assert process.wait(30) == 143
    finally:
        process.kill()
    assert list(temporary.glob("dsjob-*")) == []
    until = time.monotonic() + 10  # multiprocessing's own tracker ends a little later
    while find_processes(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert find_processes(tmp_path) == []


def test_what_deepspeed_does_not_do_is_told_before_anything_runs() -> None:
    assert main(["compare-engines", "--tolerance", "2", "x"]) == UsageError.exit_code
    assert main(["compare-engines", *SMALL, "optimizer.type=Lamb"]) == DocumentError.exit_code


def test_ranks_of_somebody_else_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["compare-engines", *SMALL]) == UsageError.exit_code
    assert "starts its own ranks" in capsys.readouterr().err
