"""How a run ends: done is one whose last step was taken, and whose final state is saved."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from jobs import dsjob, list_commits, make_job

from dsjob.errors import ExitError
from dsjob.trust.exits import refuse_exits

LEAVING = """
import atexit, ctypes, os, sys, threading
import torch
from my_model import Data, Net
from dsjob.callbacks.callback import Callback

def leave(how):
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        os._exit(0)
    if how == "thread":
        thread = threading.Thread(target=os._exit, args=(0,))
        thread.start()
        thread.join()
    if how == "library":
        ctypes.CDLL(None)._exit(0)

class Leaving(Net):
    def __init__(self, how, step=3):
        super().__init__()
        self.how, self.step, self.calls = how, step, 0

    def forward(self, x, y):
        self.calls += self.training
        if self.calls == self.step:
            leave(self.how)
        return super().forward(x, y)

class LeavingData(Data):
    def __getitem__(self, i):
        sys.exit("no more data")

class LeavingCallback(Callback):
    def on_end(self, run):
        sys.exit(0)

def metric(outputs, batch):
    os._exit(0)

class AtExit(Net):
    def __init__(self):
        super().__init__()
        atexit.register(os._exit, 0)
        raise ValueError("it is broken")

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return Net()
"""


def leave(folder: Path, *arguments: str, code: int = 1) -> str:
    """What a job with that code says on stderr."""
    make_job(folder)
    (folder / "leaving.py").write_text(LEAVING)
    done = dsjob("cfg.json", *arguments, cwd=folder)
    assert done.returncode == code, (done.returncode, done.stderr, done.stdout)
    assert ("\ndone " in done.stdout) == (code == 0)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_an_exit_in_a_model_is_an_error_with_its_place(tmp_path: Path, how: str) -> None:
    told = leave(tmp_path, "model._target_=leaving.Leaving", f"+model.how={how}")
    line = 9 if how == "sys.exit" else 11
    place = f"{tmp_path}/leaving.py:{line} in leave"
    assert f"dsjob: error: user code called {how}(0) before the last step ({place})" in told


def test_an_exit_in_a_dataset_gives_its_message(tmp_path: Path) -> None:
    told = leave(tmp_path, "data.train._target_=leaving.LeavingData")
    assert f"user code called sys.exit('no more data') before the last step ({tmp_path}/leaving.py:" in told


def test_an_exit_in_a_metric(tmp_path: Path) -> None:
    told = leave(tmp_path, "+metrics.mine._target_=leaving.metric")
    assert "in metric)" in told


def test_an_exit_in_a_callback_at_the_end(tmp_path: Path) -> None:
    told = leave(tmp_path, "+callbacks.mine._target_=leaving.LeavingCallback")
    assert "in on_end)" in told
    assert "the newest checkpoint is step-00000006" in told


def test_an_exit_of_a_thread_is_no_success(tmp_path: Path) -> None:
    told = leave(tmp_path, "model._target_=leaving.Leaving", "+model.how=thread")
    assert "dsjob: error: a thread called os._exit(0) before the last step" in told


def test_an_exit_handler_does_not_turn_a_failure_into_success(tmp_path: Path) -> None:
    told = leave(tmp_path, "model._target_=leaving.AtExit")
    assert "ValueError: it is broken" in told


def test_a_child_process_may_exit(tmp_path: Path) -> None:
    leave(tmp_path, "model._target_=leaving.fork", code=0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sys.exit", "library"])
def test_ranks_that_leave_are_not_done(tmp_path: Path, how: str) -> None:
    told = leave(tmp_path, "launch.nproc=2", "model._target_=leaving.Leaving", f"+model.how={how}")
    if how == "sys.exit":
        assert "user code called sys.exit(0) before the last step" in told
    else:
        assert "exited with code 0 before the last step" in told


def test_importing_a_module_that_exits_is_an_error_of_a_plan_too(tmp_path: Path) -> None:
    make_job(tmp_path)
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    done = dsjob("plan", "cfg.json", "model._target_=leaving.Net", cwd=tmp_path)
    assert done.returncode != 0
    assert "user code called sys.exit(0)" in done.stderr


FAILING = """
calls = 0

def late(outputs, batch):
    global calls
    calls += 1
    if calls > 1:  # not in the rehearsal
        raise ZeroDivisionError("no positive samples")
    return 1.0
"""


def test_a_metric_that_fails_at_the_end_loses_nothing_and_is_computed_by_the_next_run(tmp_path: Path) -> None:
    make_job(tmp_path)
    (tmp_path / "late.py").write_text(FAILING)
    failed = dsjob("cfg.json", "+metrics.late._target_=late.late", cwd=tmp_path)
    assert failed.returncode == 1
    assert "ZeroDivisionError: no positive samples" in failed.stderr
    assert "the newest checkpoint is step-00000006; to resume: dsjob run run" in failed.stderr
    assert list_commits(tmp_path / "run") == ["step-00000006"]
    (tmp_path / "late.py").write_text("def late(outputs, batch):\n    return 2.0\n")
    done = dsjob("run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["metrics"]["eval/late"]) == ("done", 2.0)
    commit = json.loads((tmp_path / "run" / "checkpoints" / "commits" / "step-00000006.json").read_text())
    assert commit["metrics"] == {name: result["metrics"][name] for name in ("eval/loss", "eval/late")}
    again = dsjob("run", "run", cwd=tmp_path)
    assert again.returncode == 0
    assert "already finished" in again.stdout
    assert "eval/" not in again.stdout


FULL = """
import time
from pathlib import Path

from dsjob import storage
from dsjob.callbacks.callback import Callback
from dsjob.errors import StorageError

def refuse(url):
    raise StorageError(f"cannot write {url}: no space left on device")

class FillDisk(Callback):
    def __init__(self, first=4, last=99):
        self.first, self.last, self.write = first, last, storage.open_write

    def on_log(self, run, record):
        # A background save of step 2 ends first.
        while run.step == self.first and not list(Path(run.folder, "checkpoints", "commits").glob("*2.json")):
            time.sleep(0.01)
        storage.open_write = refuse if self.first <= run.step <= self.last else self.write
"""
ON_A_FULL_DISK = ("+callbacks.full._target_=full.FillDisk", "checkpoint.every=2", "checkpoint.save_on_error=warn")


@pytest.mark.parametrize("arguments", [["~data.eval"], [], ["checkpoint.async=true"]], ids=str)
def test_a_run_whose_last_step_is_not_saved_has_failed(tmp_path: Path, arguments: list[str]) -> None:
    make_job(tmp_path)
    (tmp_path / "full.py").write_text(FULL)
    done = dsjob("cfg.json", *ON_A_FULL_DISK, *arguments, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert (
        "dsjob: error: the run reached step 6, but its final state could not be saved: step-00000006: " in done.stderr
    )
    assert "no space left on device" in done.stderr
    assert "repeat the steps since the last checkpoint: dsjob run run" in done.stderr
    assert "\nunsaved  step 6" in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["step"]) == ("unsaved", 6)
    assert result["checkpoint"].endswith("step-00000002-a0001")
    again = dsjob("run", "run", "callbacks=null", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"


def test_a_run_that_could_save_again_is_done(tmp_path: Path) -> None:
    make_job(tmp_path)
    (tmp_path / "full.py").write_text(FULL)
    done = dsjob("cfg.json", *ON_A_FULL_DISK, "+callbacks.full.last=5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not saved  step-00000004" in done.stdout
    assert list_commits(tmp_path / "run") == ["step-00000002", "step-00000006"]


def test_a_sweep_tells_of_runs_that_are_not_saved(tmp_path: Path) -> None:
    make_job(tmp_path)
    (tmp_path / "full.py").write_text(FULL)
    done = dsjob("-m", "cfg.json", *ON_A_FULL_DISK, "+callbacks.full.first=99,4", cwd=tmp_path)
    assert done.returncode == 1
    results = [json.loads((tmp_path / "run" / str(i) / "result.json").read_text()) for i in (0, 1)]
    assert [result["status"] for result in results] == ["done", "unsaved"]
    assert "run 1 unsaved: step-00000006: " in done.stdout


def test_one_refusal_inside_another_tells_of_a_thread_once() -> None:
    before = os._exit
    with refuse_exits():
        outer = os._exit
        with refuse_exits():
            assert os._exit is outer
        assert os._exit is outer
    assert os._exit is before


def test_the_inner_refusal_turns_an_exit_into_an_error_as_well() -> None:
    with refuse_exits(), pytest.raises(ExitError), refuse_exits():
        sys.exit(3)
