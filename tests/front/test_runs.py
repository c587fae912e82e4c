"""Runs in a folder: what is listed, from which files, and how fast."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import dsjob, make_job
from programs import DSJOB, Program, clean_env

from dsjob import list_runs
from dsjob.cli.runs import show_compared, show_runs
from dsjob.errors import UsageError
from dsjob.front.runs import compare_runs, describe
from dsjob.planning.plot import spark
from dsjob.report.gather import gather
from dsjob.report.page import make_page
from dsjob.run_folder import is_running, marking_running

DIE = """

import os, signal, time
from dsjob import Callback

class Act(Callback):
    def on_log(self, run, record):
        if run.step == 3 and os.environ.get("ACT") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if run.step == 3 and os.environ.get("ACT") == "wait":
            open("waits", "w").close()
            time.sleep(60)
"""


def write_run(folder: Path, steps: int, *, result: dict[str, Any] | None = None, **document: Any) -> Path:
    """The files of a run whose loss falls from 1 to 0, logged at each step."""
    folder.mkdir(parents=True)
    (folder / "resolved.json").write_text(json.dumps({"name": "a", "trainer": {"max_steps": steps}, **document}))
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "loss": 1 - step / steps, "lr": 0.1}) + "\n")
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def count_bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.full("1")
def test_the_status_of_real_runs(tmp_path: Path, nproc: int) -> None:
    make_job(tmp_path, callbacks={"act": {"_target_": "my_model.Act"}}, launch={"nproc": nproc})
    (tmp_path / "my_model.py").write_text((tmp_path / "my_model.py").read_text() + DIE)
    runs = tmp_path / "runs"
    assert dsjob("cfg.json", "output.dir=runs/done", cwd=tmp_path).returncode == 0
    bad = dsjob("cfg.json", "model._target_=my_model.NanOnce", "output.dir=runs/failed", cwd=tmp_path)
    assert bad.returncode == 1
    command = [DSJOB, "cfg.json", "output.dir=runs/killed"]
    process = Program(command, cwd=tmp_path, env=clean_env(ACT="wait"))
    while not (tmp_path / "waits").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert describe(str(runs / "killed")).status == "running"
    process.kill()
    process.wait(60)
    assert {Path(run.folder).name: run.status for run in list_runs(str(runs))} == {
        "killed": "killed",
        "failed": "failed",
        "done": "done",
    }
    (done,) = (run for run in list_runs(str(runs)) if run.status == "done")
    assert (done.name, done.step, done.max_steps, done.metric) == ("cfg", 6, 6, "eval/loss")
    assert not (runs / "done" / "running").exists()
    assert not (runs / "failed" / "running").exists()


@pytest.mark.parametrize(
    ("trainer", "epoch", "total"),
    [
        ({"max_epochs": 3}, 0.5, 36),
        ({"max_epochs": 3, "max_steps": 10}, 0.5, 10),
        ({"max_length": "2.5ep"}, 0.5, 30),
        ({"max_length": "100sp", "train_batch": 8}, 0.5, 13),
        ({"max_epochs": 3}, 0.0, None),  # a stream
        ({"max_length": "1h"}, 0.5, None),
    ],
)
def test_the_steps_of_a_whole_run(tmp_path: Path, trainer: dict[str, Any], epoch: float, total: int | None) -> None:
    folder = write_run(tmp_path / "run", 6, trainer=trainer)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "loss": 0.5, "epoch": epoch}) + "\n")
    assert describe(str(folder)).max_steps == total


def test_a_lock_is_not_inherited(tmp_path: Path) -> None:
    with marking_running(str(tmp_path)):
        assert is_running(str(tmp_path))
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not is_running(str(tmp_path))


def test_a_killed_process_leaves_no_lock_although_its_workers_live_on(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        with marking_running(str(tmp_path)):
            worker = os.fork()
            if worker == 0:
                time.sleep(30)
                os._exit(0)
            os.write(writer, f"{worker}\n".encode())
            time.sleep(30)
        os._exit(0)
    worker = int(os.read(reader, 20))
    time.sleep(0.2)
    assert is_running(str(tmp_path))
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert not is_running(str(tmp_path))
    assert (tmp_path / "running").exists()
    os.kill(worker, signal.SIGKILL)


def test_a_second_run_in_the_folder_does_not_take_the_lock_away(tmp_path: Path) -> None:
    with marking_running(str(tmp_path)):
        with marking_running(str(tmp_path)):
            pass
        assert is_running(str(tmp_path))


def test_the_best_is_that_of_the_checkpoints(tmp_path: Path) -> None:
    best = {"metric": "eval/f1", "mode": "max", "keep": 2}
    folder = write_run(tmp_path / "a", 4, checkpoint={"best": best}, result={"status": "done"})
    commits = folder / "checkpoints" / "commits"
    commits.mkdir(parents=True)
    for step, value in ((2, 0.75), (3, 0.5)):
        (commits / f"step-{step}.json").write_text(json.dumps({"metrics": {"eval/f1": value}}))
    (commits / "broken.json").write_text("{")
    run = describe(str(folder))
    assert (run.metric, run.best, run.last) == ("eval/f1", 0.75, None)


def test_a_run_with_damaged_files_is_listed(tmp_path: Path) -> None:
    (write_run(tmp_path / "a", 2) / "resolved.json").write_text("{")
    assert [(run.name, run.status) for run in list_runs(str(tmp_path))] == [("a", "unreadable")]


_BAD = ("5", "[]", '"x"', "true", "1e999", "NaN", "1" + "0" * 400, "[" * 100_000, '"\\ud800"')


@pytest.mark.parametrize("bad", _BAD, ids=lambda bad: bad[:9])
def test_damaged_files_never_hide_other_runs(tmp_path: Path, bad: str) -> None:
    def write(folder: Path, name: str, text: str) -> None:
        shutil.copytree(good, folder)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace('"BAD"', bad))

    best = {"best": {"metric": "loss"}}
    good = write_run(tmp_path / "good", 4, result={"status": "done"}, checkpoint=best)
    trainers = [{"max_steps": "BAD"}, {"max_length": "BAD"}, {"max_length": "1e999ep"}, {"train_batch": "BAD"}, "BAD"]
    bests = [{"best": "BAD"}, {"best": {"metric": "BAD"}}, {"best": {"mode": "BAD"}}, {**best, "dir": "BAD"}]
    documents = ["BAD", {"name": "BAD"}, *({"trainer": each} for each in trainers)]
    documents += [{"checkpoint": each} for each in ("BAD", *bests)]
    for number, document in enumerate(documents):
        write(tmp_path / f"d{number}", "resolved.json", json.dumps(document))
    for name in ("result.json", "metrics.jsonl", "job.jsonl", "environment.jsonl", "checkpoints/commits/a.json"):
        write(tmp_path / f"whole-{name.rpartition('/')[2]}", name, '"BAD"')
    for key, name in (("status", "result.json"), ("step", "metrics.jsonl"), ("loss", "metrics.jsonl")):
        write(tmp_path / f"{key}", name, json.dumps({"step": 2, "loss": 1, key: "BAD"}) + "\n")
    write(
        tmp_path / "commit", "checkpoints/commits/a.json", '{"tag": "BAD", "step": "BAD", "metrics": {"loss": "BAD"}}'
    )
    found = list_runs(str(tmp_path))
    assert {run.folder: run.status for run in found}[str(good)] == "done"
    assert len(found) == len(list(tmp_path.iterdir()))
    show_runs(found, "runs")
    json.dumps([dataclasses.asdict(run) for run in found])
    for run in found:
        if run.status != "unreadable":
            show_compared(compare_runs(str(good), run.folder), "a", "b")
    make_page(gather([str(tmp_path)]), "plotly").encode(errors="replace")


def test_runs_are_found_below_and_the_newest_comes_first(tmp_path: Path) -> None:
    for age, name in ((30, "b/2026/0"), (10, "a"), (20, "b/2026/1")):
        path = write_run(tmp_path / name, 3, result={"status": "done"}) / "metrics.jsonl"
        os.utime(path, (time.time() - age,) * 2)
    (tmp_path / ".hidden").mkdir()
    assert [os.path.relpath(run.folder, tmp_path) for run in list_runs(str(tmp_path))] == ["a", "b/2026/1", "b/2026/0"]
    with pytest.raises(UsageError, match="no folder"):
        list_runs(str(tmp_path / "c"))


def test_runs_of_programs_are_listed_and_evaluations_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 2, tasks=["train", "eval"])
    write_run(tmp_path / "evaluated", 2, tasks=["eval"])
    write_run(tmp_path / "predicted", 2, tasks=["predict"])
    for name, lr in (("p", 0.1), ("q", 0.2)):
        folder = write_run(tmp_path / name, 4, result={"status": "done"})
        (folder / "resolved.json").unlink()
        (folder / "program.json").write_text('{"command": ["scripts/train.py", "--fast"], "engine": "dsjob"}')
        (folder / "deepspeed.json").write_text(json.dumps({"optimizer": {"params": {"lr": lr}}}))
    found = {Path(run.folder).name: run for run in list_runs(str(tmp_path))}
    assert found.keys() == {"a", "p", "q"}
    program = found["p"]
    assert (program.name, program.status, program.step, program.max_steps) == ("train", "done", 4, None)
    assert (program.last, list(program.losses)) == (0, [0.75, 0.5, 0.25, 0])
    compared = compare_runs(*(str(tmp_path / name) for name in "pq"))
    assert compared.document == {"deepspeed.optimizer.params.lr": (0.1, 0.2)}


def test_a_long_run_is_sampled(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 100_000)
    assert (folder / "metrics.jsonl").stat().st_size > 4e6
    before = count_bytes_read()
    run = describe(str(folder))
    assert count_bytes_read() - before < 400_000
    assert run.step == 100_000
    assert 20 <= len(run.losses) <= 24
    assert list(run.losses) == sorted(run.losses, reverse=True)
    assert run.losses[0] > 0.95
    assert run.losses[-1] < 0.05


def test_the_losses_of_a_short_run_are_all_there(tmp_path: Path) -> None:
    assert describe(str(write_run(tmp_path / "a", 2))).losses == [0.5, 0.0]
    assert len(describe(str(write_run(tmp_path / "b", 100))).losses) == 24


def test_a_thousand_runs_are_listed_quickly(tmp_path: Path) -> None:
    for number in range(1000):
        write_run(tmp_path / f"{number:04}", 50, result={"status": "done"})
    began = time.process_time()
    assert len(list_runs(str(tmp_path))) == 1000
    assert time.process_time() - began < 3


def test_what_differs_between_two_runs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", 4, optimizer={"params": {"lr": 0.1}}, output={"dir": "a"})
    second = write_run(tmp_path / "b", 8, optimizer={"params": {"lr": 0.2, "eps": 1}}, output={"dir": "b"})
    found = compare_runs(str(first), str(second))
    assert found.document == {
        "trainer.max_steps": (4, 8),
        "optimizer.params.lr": (0.1, 0.2),
        "optimizer.params.eps": (None, 1),
    }
    assert found.metrics["loss"] == (0, 0)
    assert found.metrics["step"] == (4, 8)
    with pytest.raises(UsageError, match="is not the folder of a run"):
        compare_runs(str(first), str(tmp_path))


def test_the_command_lists_sorts_and_compares(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs/b", 4, result={"status": "done"}, name="second")
    write_run(tmp_path / "outputs/c", 8, result={"status": "failed"}, name="first")
    done = dsjob("runs", "--sort", "name", cwd=tmp_path)
    header, first, second = done.stdout.splitlines()
    assert header.split() == ["name", "status", "step", "metric", "age", "loss", "folder"]
    assert first.split()[:5] == ["first", "failed", "8/8", "loss", "0"]
    assert first.split()[-1] == "outputs/c"
    assert "█" in first
    assert second.split()[:2] == ["second", "done"]
    listed = json.loads(dsjob("runs", "outputs", "--json", "--sort", "step", "--reverse", cwd=tmp_path).stdout)
    assert [(run["name"], run["step"]) for run in listed] == [("first", 8), ("second", 4)]
    shown = dsjob("runs", "diff", "outputs/b", "outputs/c", cwd=tmp_path).stdout
    assert ["name", '"second"', '"first"'] in [line.split() for line in shown.splitlines()]
    found = json.loads(dsjob("runs", "diff", "outputs/b", "outputs/c", "--json", cwd=tmp_path).stdout)
    assert found["document"]["trainer.max_steps"] == [4, 8]
    assert dsjob("runs", "nowhere", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 7.0], "▁█"),
        ([float(n) for n in range(8)], "▁▃▆█"),
        ([0.0, float("nan"), 1.0, float("inf")], "▁█"),
    ],
)
def test_a_curve(values: list[float], curve: str) -> None:
    assert spark(values, 4) == curve
