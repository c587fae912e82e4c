"""The smoke run: the whole job on a few steps in a temporary folder, before the job starts or instead of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import dsjob, list_commits, make_job, read_metrics

MODULE = """
import pathlib

from dsjob import Callback, Monitor

class Stream:
    def __iter__(self):
        import my_model
        return iter(my_model.Data())

class Fails:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        raise ValueError("no picture 7.jpg")

class Remembers(Callback):
    def state_dict(self):
        return {"seen": 1}
    def load_state_dict(self, state):
        raise ValueError("cannot go back")

class Board(Monitor):
    def begin(self, series):
        pathlib.Path("board").touch()
    def write_events(self, events):
        pass
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a job."""
    make_job(tmp_path)
    (tmp_path / "more.py").write_text(MODULE)
    (tmp_path / "temporary").mkdir()
    return tmp_path


def smoke(job: Path, *arguments: str) -> Any:
    done = dsjob("cfg.json", *arguments, cwd=job, TMPDIR=str(job / "temporary"))
    assert list((job / "temporary").iterdir()) == []
    return done


def list_places(job: Path) -> set[str]:
    return {path.name for path in job.iterdir()} - {"__pycache__"}


def test_a_run_is_the_same_after_a_smoke_run(job: Path) -> None:
    plain = smoke(job, "output.dir=plain")
    tried = smoke(job, "output.dir=tried", "--smoke")
    assert plain.returncode == tried.returncode == 0, tried.stderr
    lines = [line for line in tried.stdout.splitlines() if line.startswith("smoke run")]
    assert len(lines) == 2
    done = "2 steps, an evaluation (eval/loss), a save, a resume to step 3, a conversion to fp32"
    assert lines[0].endswith(done)
    assert "a step took" in lines[1]
    assert read_metrics(job / "tried") == read_metrics(job / "plain")
    assert len(read_metrics(job / "tried")) == 6
    assert list_commits(job / "tried") == list_commits(job / "plain")


@pytest.mark.parametrize(
    "overrides",
    [
        ["launch.nproc=2", "zero_optimization.stage=3"],
        ["data.train={_target_: more.Stream}", "~data.eval", "trainer.log_every=1000"],
        ["~trainer.max_steps", "trainer.max_epochs=1", "checkpoint.every_epochs=0.1", "output.dir=%name-%time"],
        ["++monitor.csv_monitor={enabled: true, output_path: csv}", "++monitor.custom.board={_target_: more.Board}"],
        ["++checkpoint.dir=kept", "++checkpoint.best={metric: eval/loss}", "++checkpoint.load_best_at_end=true"],
    ],
    ids=["ranks", "stream", "epochs", "monitors", "checkpoints"],
)
def test_only_trying_leaves_nothing_behind(job: Path, overrides: list[str]) -> None:
    before = list_places(job)
    done = smoke(job, "--smoke-only", "--json", *overrides)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert told["event"] == "smoke"
    assert len(told["step_seconds"]) == 3
    assert ("evaluation" in line) == ("~data.eval" not in overrides)
    assert list_places(job) == before


@pytest.mark.parametrize(
    ("override", "doing", "error"),
    [
        ("data.eval={_target_: more.Fails}", "training", "data.eval[0] failed: ValueError: no picture 7.jpg"),
        ("++callbacks.late={_target_: more.Remembers}", "resuming", "ValueError: cannot go back"),
        ("+model.width=3", "training", 'model.width: my_model.build has no argument "width"'),
    ],
)
def test_a_failure_is_the_jobs_own_error_and_nothing_is_started(
    job: Path, override: str, doing: str, error: str
) -> None:
    before = list_places(job)
    if override.startswith("data.eval"):
        make_job(job, data={"train": {"_target_": "my_model.Data"}})
        override = f"++{override}"
    done = smoke(job, "--smoke", override)
    assert done.returncode in (1, 2)
    told = done.stderr.splitlines()
    assert told[0] == f"dsjob: the smoke run failed while {doing}; nothing was started"
    assert error in told[1]
    assert "step" not in done.stdout
    assert list_places(job) == before


@pytest.mark.parametrize("batches", [None, 1])
def test_predictions_are_tried_on_a_few_batches(job: Path, batches: int | None) -> None:
    """The dataset fails beyond the samples that a smoke run reads."""
    read = 3 * (batches or 4)
    (job / "few.py").write_text(
        "import my_model\n\n"
        "class Few(my_model.Data):\n"
        "    def __getitem__(self, index):\n"
        f"        if index >= {read}:\n"
        "            raise ValueError('read on')\n"
        "        return super().__getitem__(index)\n"
    )
    before = list_places(job)
    sections = ["++data.test={_target_: few.Few}", "++trainer.eval_micro_batch=3", "++predict.dir=kept"]
    limit = ["++predict.batches=1"] if batches else []
    tried = ["tasks=[train,predict]", "++predict.outputs={loss: batch.1}", *sections, *limit]
    done = smoke(job, "--smoke-only", "--json", *tried)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tried"][2:4] == ["predictions", "a save"]
    assert list_places(job) == before
    failed = smoke(job, "--smoke-only", *tried, "++predict.outputs={loss: batch.2}")
    assert failed.returncode == 1
    assert "predict.outputs.loss" in failed.stderr


def test_deepspeed_has_no_smoke_run_under_torchrun(job: Path) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = dsjob("cfg.json", "--smoke", "engine=deepspeed", cwd=job, **ranks)
    assert done.returncode == 2
    assert "DeepSpeed's can be built only once" in done.stderr
    assert "dsjob run --smoke-only without torchrun or srun" in done.stderr
    assert not (job / "runs").exists()


def test_a_job_that_does_not_train_has_no_smoke_run(job: Path) -> None:
    done = smoke(job, "--smoke", "tasks=[eval]")
    assert done.returncode == 2
    assert "this job does not train" in done.stderr
