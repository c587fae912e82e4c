"""A start that fails leaves nothing behind, and never takes away what was there or what its error points at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import dsjob, make_job

from dsjob.errors import DsjobError
from dsjob.run_folder import make_run_dir
from dsjob.training.failed_starts import find_existing, taking_back


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(
    ("override", "nproc"),
    [
        ("model._target_=my_model.Crash", 1),
        ("model._target_=my_model.Crash", 2),
        ("+model.dropuot=1", 1),
        ("checkpoint.resume=required", 1),
        ("+data.train.n=0", 1),
    ],
)
def test_a_run_that_fails_at_once_leaves_no_folder(tmp_path: Path, override: str, nproc: int) -> None:
    make_job(tmp_path)
    before = list_files(tmp_path)
    done = dsjob("cfg.json", override, f"launch.nproc={nproc}", "output.dir=outputs/%name/%time", cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert list_files(tmp_path) == before, done.stderr


def test_a_run_that_fails_after_a_log_record_keeps_its_folder(tmp_path: Path) -> None:
    make_job(tmp_path, model={"_target_": "my_model.NanOnce"})
    assert dsjob("cfg.json", cwd=tmp_path).returncode == 1
    assert (tmp_path / "run/resolved.json").exists()
    assert (tmp_path / "run/metrics.jsonl").exists()


def test_a_run_that_fails_before_its_first_log_record_says_so_where_its_folder_remains(tmp_path: Path) -> None:
    make_job(tmp_path, callbacks={"fails": {"_target_": "my_model.Fails"}})
    with open(tmp_path / "my_model.py", "a", encoding="utf-8") as file:
        file.write("from dsjob import Callback\nclass Fails(Callback):\n    def on_record(self, run, record): 1 / 0\n")
    assert dsjob("cfg.json", cwd=tmp_path).returncode == 1
    assert (tmp_path / "run/logs/traceback-00000.txt").exists()
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "failed"
    assert result["error"].startswith("ZeroDivisionError")


def test_a_folder_with_an_earlier_run_stays_as_it_is(tmp_path: Path) -> None:
    make_job(tmp_path)
    assert dsjob("cfg.json", cwd=tmp_path).returncode == 0
    before = list_files(tmp_path / "run") - {"result.json"}
    failed = dsjob("cfg.json", "model._target_=my_model.Crash", "trainer.max_steps=9", cwd=tmp_path)
    assert failed.returncode != 0
    assert before <= list_files(tmp_path / "run")


def start(folder: Path, pattern: str, message: str, files: tuple[str, ...]) -> Path:
    """A start that writes `files` and fails; the run's folder."""
    existing, run_dir = find_existing(f"{folder}/{pattern}", "job"), Path(make_run_dir(f"{folder}/{pattern}", "job"))

    def fail() -> None:
        with taking_back(str(run_dir), existing):
            for file in files:
                (run_dir / file).parent.mkdir(parents=True, exist_ok=True)
                (run_dir / file).write_text("")
            raise DsjobError(message.format(run_dir))

    with pytest.raises(DsjobError):
        fail()
    return run_dir


WRITTEN = ("resolved.json", "logs/rank-00001.log", "checkpoints/attempts/a0001.json")


def test_folders_above_go_up_to_those_that_were_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    start(tmp_path, "mine/%name/deep/%time", "failed", WRITTEN)
    assert list_files(tmp_path) == {"mine"}
    (tmp_path / "mine/job").mkdir()
    start(tmp_path, "mine/%name", "failed", WRITTEN)
    assert list_files(tmp_path) == {"mine"}  # the run's own folder, which was empty


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("failed: its output is in {}/logs", ()),
        ("failed", ("metrics.jsonl",)),
        ("failed", ("checkpoints/commits/step-00000001.json",)),
        ("failed", ("checkpoints/attempts/a0002.json",)),
        ("failed", ("notes.txt",)),
        ("failed", ("samples/one.txt",)),
    ],
)
def test_what_is_of_use_stays(tmp_path: Path, message: str, more: tuple[str, ...]) -> None:
    run_dir = start(tmp_path, "%name/%time", message, (*WRITTEN, *more))
    for file in (*WRITTEN, *more):
        assert (run_dir / file).exists()


def test_a_folder_that_held_something_stays(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/resolved.json").write_text("")
    start(tmp_path, "%name", "failed", WRITTEN)
    assert (tmp_path / "job/resolved.json").exists()
