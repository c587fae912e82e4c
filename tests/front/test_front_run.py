"""`dsjob.run` from Python programs of all kinds, and the process that they run in."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs import make_job
from programs import clean_env, run_program

import dsjob
from dsjob import errors

pytestmark = pytest.mark.slow

DOCUMENT: dict[str, Any] = {
    "model": {"_target_": "my_model.build"},
    "data": {"train": {"_target_": "my_model.Data"}, "eval": {"_target_": "my_model.Data", "n": 10, "seed": 1}},
    "trainer": {"train_batch": 8, "max_steps": 3, "log_every": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "output": {"dir": "run"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the module that jobs name; its name belongs to another folder in the next test."""
    make_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_model", None)


def test_a_dict_is_run_and_its_result_tells_what_came_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = dsjob.run(DOCUMENT)
    assert (result.status, result.step, result.error) == ("done", 3, "")
    assert result.run_dir == "run"
    assert result.checkpoint is not None
    assert (folder / result.checkpoint).is_dir()
    assert [record["step"] for record in result.history] == [1, 2, 3, 3]
    assert result.metrics["loss"] == result.history[2]["loss"]
    assert result.metrics["eval/loss"] == result.history[3]["eval/loss"]
    assert "history" not in repr(result)
    printed = capsys.readouterr().out
    assert "starting job (a dict) on 1 rank" in printed
    assert "step 3/3 100%" in printed
    with pytest.raises(AttributeError):
        result.step = 4  # type: ignore[misc]


def test_a_path_a_folder_and_overrides_are_what_they_are_to_the_command(folder: Path) -> None:
    first = dsjob.run(folder / "cfg.json", overrides=["trainer.max_steps=2"])
    assert first.step == 2
    longer = dsjob.run(first.run_dir, overrides=["trainer.max_steps=4"])
    assert [record["step"] for record in longer.history if "loss" in record] == [1, 2, 3, 4]


def test_ranks_of_their_own_give_the_same_and_show_their_progress(capsys: pytest.CaptureFixture[str]) -> None:
    alone = dsjob.run(DOCUMENT)
    capsys.readouterr()
    two = dsjob.run(DOCUMENT, overrides=["launch.nproc=2", "output.dir=two"])
    assert two.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)
    assert "step 3/3 100%" in capsys.readouterr().out  # which the ranks' own descriptors would not have reached


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_works_on_a_thread(nproc: int) -> None:
    found: list[dsjob.Result] = []
    thread = threading.Thread(target=lambda: found.append(dsjob.run(DOCUMENT, overrides=[f"launch.nproc={nproc}"])))
    thread.start()
    thread.join()
    assert [result.step for result in found] == [3]


def test_a_run_works_under_a_running_event_loop() -> None:
    async def train() -> tuple[dsjob.Result, dsjob.Result]:
        here = dsjob.run(DOCUMENT)
        return here, await asyncio.to_thread(dsjob.run, DOCUMENT, overrides=["output.dir=other"])

    here, aside = asyncio.run(train())
    assert here.metrics == aside.metrics


def test_a_second_run_at_the_same_time_is_refused(folder: Path) -> None:
    (folder / "nested.py").write_text(
        "import dsjob\nclass Nested(dsjob.Callback):\n    def on_start(self, run):\n"
        "        dsjob.run(recipe='quickstart')\n"
    )
    with pytest.raises(errors.UsageError, match="a run is under way in this process"):
        dsjob.run({**DOCUMENT, "callbacks": {"nested": {"_target_": "nested.Nested"}}})
    assert dsjob.run(DOCUMENT).step == 3  # and the next one is not


def test_a_run_does_not_touch_a_process_group_of_the_program() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(errors.UsageError, match="already has a process group") as caught:
            dsjob.run(DOCUMENT)
        assert "launch.nproc=2" in caught.value.hint
        assert dist.is_initialized()
        assert dsjob.run(DOCUMENT, overrides=["launch.nproc=2"]).step == 3
    finally:
        dist.destroy_process_group()


# ---- what a run leaves as it was

MEDDLING = """
import os, random, sys, warnings
import torch
import dsjob

class Meddler(dsjob.Callback):
    def __init__(self, fails):
        self.fails = fails

    def on_end(self, run):
        os.environ["MEDDLED"] = "1"
        os.environ.pop("KEPT", None)
        os.chdir("/")
        sys.path.insert(0, "/meddled")
        warnings.simplefilter("ignore")
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
        if self.fails:
            raise ValueError("it fails")
"""


def take_stock() -> dict[str, Any]:
    """What a process has once."""
    return {
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "filters": list(warnings.filters),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tobytes(),  # type: ignore[index,union-attr]
        "torch": torch.get_rng_state().numpy().tobytes(),
        "group": dist.is_initialized(),
        "crashes": faulthandler.is_enabled(),
        "streams": (sys.stdout, sys.stderr),
        "exit": os._exit,
        "children": {child.pid for child in multiprocessing.active_children()},
        "threads alive": {thread.name for thread in threading.enumerate() if "dsjob" in thread.name},
    }


FAILING = """
from my_model import Net as Plain

class Net(Plain):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def forward(self, x, y):
        self.steps -= 1
        if self.steps < 0:
            raise ValueError("enough")
        return super().forward(x, y)
"""


@pytest.mark.parametrize("overrides", [[], ["launch.nproc=2"]], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
@pytest.mark.full("done-two ranks")
def test_a_run_leaves_the_process_as_it_was(
    folder: Path, overrides: list[str], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "meddling.py").write_text(MEDDLING)
    monkeypatch.setenv("KEPT", "1")
    callbacks = {"meddler": {"_target_": "meddling.Meddler", "fails": fails}}
    document = {**DOCUMENT, "callbacks": callbacks, "output": {"dir": f"{folder}/run"}}
    usual = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        before = take_stock()
        if fails:
            with pytest.raises((ValueError, errors.LaunchError), match="it fails"):
                dsjob.run(document, overrides=overrides)
        else:
            assert dsjob.run(document, overrides=overrides).step == 3
        assert take_stock() == before
    finally:
        signal.signal(signal.SIGTERM, usual)
        sys.modules.pop("meddling", None)


@pytest.mark.parametrize("steps", [0, 2])
def test_no_hint_names_a_flag_of_the_command(folder: Path, steps: int) -> None:
    (folder / "meddling.py").write_text(FAILING)
    document = {**DOCUMENT, "model": {"_target_": "meddling.Net", "steps": steps}, "launch": {"nproc": 2}}
    with pytest.raises(errors.LaunchError, match="ValueError: enough") as caught:
        dsjob.run(document)
    kept = "the traceback is in run/logs/traceback-0000"
    assert (kept if steps else "set launch.nproc=1 to see the traceback") in caught.value.hint


# ---- programs of their own

SCRIPT = """
import sys
import dsjob

print("the program begins", __name__)
result = dsjob.run({
    "model": {"_target_": "my_model.build"},
    "data": {"train": {"_target_": "my_model.Data"}},
    "trainer": {"train_batch": 8, "max_steps": 3},
    "optimizer": {"type": "AdamW"},
    "output": {"dir": "run"},
    "launch": {"nproc": int(sys.argv[1])},
})
print(f"the program ends {result.step}\\n", end="")  # one write: ranks share the pipe
"""


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.full("1")
def test_a_script_without_a_guard_runs_its_job_from_any_folder(tmp_path: Path, folder: Path, nproc: int) -> None:
    """Ranks never import it, and find the modules that lie beside it."""
    (folder / "train.py").write_text(SCRIPT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ran = run_python(["../train.py", str(nproc)], elsewhere, fresh=nproc == 1)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("the program begins __main__") == 1
    assert ran.stdout.endswith("the program ends 3\n")
    longer = run_python(["-m", "dsjob", "run", "run", "trainer.max_steps=4"], elsewhere)
    assert longer.returncode == 0, longer.stderr
    assert "step 4/4 100%" in longer.stdout


def test_each_rank_of_torchrun_gets_the_result(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    ran = run_python(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", "2"], folder)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("the program ends 3") == 2
    assert ran.stdout.count("starting job (a dict) on 2 ranks") == 1


def run_python(arguments: list[str], folder: Path, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = clean_env(PYTHONSAFEPATH="") if arguments[0] != "-m" else clean_env(PYTHONSAFEPATH="1")
    if not fresh:
        return run_program(command, cwd=folder, env=environment)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full("2")
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_notebook_shows_the_progress_of_its_cells(folder: Path, nproc: int) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        f"import dsjob\ndocument = {DOCUMENT!r}",
        f"dsjob.run(document, overrides=['launch.nproc={nproc}']).step",
        "dsjob.run({**document, 'model': {'_target_': 'my_model.Crash'}, 'output': {'dir': 'crash'}})",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs = notebook.cells[1].outputs
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "step 1/3  33%" in printed
    assert "step 3/3 100%" in printed
    assert "saved" in printed
    assert outputs[-1].data["text/plain"] == "3"
    (failed,) = [output for output in notebook.cells[2].outputs if output.output_type == "error"]
    assert (failed.ename, failed.evalue) == ("ValueError", "shapes do not fit")
