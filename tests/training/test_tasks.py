"""Tasks besides training: they give the same on any number of ranks, and build only what they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import metric_jobs
import pytest
import small_jobs
from job_documents import find_problems, resolve
from metric_jobs import Rare, expect, run_each
from ranks import run_ranks

from dsjob.document.resolve import complete_job
from dsjob.errors import NoCheckpointError
from dsjob.ranks.mesh import World
from dsjob.training.job import run_job

pytestmark = pytest.mark.usefixtures("hooks")

SMALL = {"_target_": "small_jobs.Data"}
DATA = {"train": SMALL, "eval": {**SMALL, "n": 21}, "test": {"a": {**SMALL, "n": 1}, "b": {**SMALL, "n": 10}}}
NOT_BUILT = {"train": {"_target_": "small_jobs.Data", "n": "not a number"}}
F1 = {"f1": {"_target_": "metric_jobs.F1"}}


def read_result(folder: Path | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return found


def evaluate_on_ranks(world: World, folder: str, sections: dict[str, Any]) -> None:
    job = resolve(small_jobs.make_document(f"{folder}/evaluated", **sections), world_size=world.data_size)
    Path(folder, "evaluated").mkdir(exist_ok=True)
    run_job(complete_job(job), f"{folder}/evaluated", world, small_jobs.TRUST)


@pytest.mark.parametrize(
    ("world_size", "stage", "bf16"), [(1, 0, True), (2, 3, True), (2, 0, True), (3, 0, False), (3, 3, False)]
)
def test_an_evaluation_alone_gives_what_the_training_gave(
    tmp_path: Path, world_size: int, stage: int, bf16: bool
) -> None:
    """From a checkpoint of one rank, without training data and without an optimizer."""
    low = {"bf16": {"enabled": bf16}}
    small_jobs.train(tmp_path, data=DATA, tasks=["train", "eval"], **low)
    trained = read_result(tmp_path)
    assert {"eval/loss", "test/a/loss", "test/b/loss"} <= trained["metrics"].keys()
    sections = {
        "data": {**DATA, **NOT_BUILT},
        "tasks": ["eval"],
        "trainer": {"train_batch": 2 * world_size, "micro_batch": 2},
        "optimizer": None,
        "scheduler": None,
        "callbacks": {},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"resume": str(tmp_path)},
        **low,
    }
    run_ranks(evaluate_on_ranks, world_size, str(tmp_path), sections)
    found = read_result(tmp_path / "evaluated")
    assert found["step"] == 8
    assert found["checkpoint"].startswith(f"{tmp_path}/checkpoints/step-00000008-a0001")
    assert found["metrics"].keys() == {"eval/loss", "test/a/loss", "test/b/loss"}
    for name, value in found["metrics"].items():
        assert value == pytest.approx(trained["metrics"][name], rel=1e-2 if bf16 else 1e-5)
    assert not (tmp_path / "evaluated" / "checkpoints").exists()


@pytest.mark.parametrize("world_size", [1, 3])
def test_metrics_of_the_test_set_see_each_sample_once(tmp_path: Path, world_size: int) -> None:
    rare = {"_target_": "metric_jobs.Rare"}
    data = {"train": rare, "test": {**rare, "n": 38, "seed": 4}}
    given = [
        {"data": data, "tasks": ["eval"], "metrics": F1, "trainer": {"micro_batch": micro, "eval_every": 0}}
        for micro in (16, 3)
    ]
    run_ranks(run_each, world_size, str(tmp_path), given)
    results = [read_result(file.parent) for file in tmp_path.glob("*/result.json")]  # of rank 0
    assert [result["metrics"]["test/f1"] for result in results] == [expect(Rare(38, 4))["own/f1"]] * 2
    assert [result["checkpoint"] for result in results] == [None, None]


def test_a_finished_run_performs_its_other_tasks_again(tmp_path: Path) -> None:
    small_jobs.train(tmp_path, data=DATA)
    assert "test/a/loss" not in read_result(tmp_path)["metrics"]
    small_jobs.train(tmp_path, data=DATA, tasks=["train", "eval"])
    assert {"eval/loss", "test/a/loss"} <= read_result(tmp_path)["metrics"].keys()


@pytest.mark.parametrize("resume", ["step-00000004", "required", "./nowhere"])
def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path, resume: str) -> None:
    with pytest.raises(NoCheckpointError):
        small_jobs.train(tmp_path, data=DATA, tasks=["eval"], checkpoint={"resume": resume})


@pytest.mark.parametrize("tasks", [["eval"], ["train", "predict"]])
def test_a_task_without_data_is_a_mistake(tasks: list[str]) -> None:
    document = {**small_jobs.make_document("x"), "tasks": tasks}
    assert [(p.dotted, p.message) for p in find_problems(document)] == [
        ("tasks", f"{tasks[-1]} needs data.eval or data.test")
    ]
    document = metric_jobs.make_document("x", tasks=[])
    assert "tasks" in [p.dotted for p in find_problems(document)]
