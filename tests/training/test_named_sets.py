"""Several evaluation sets by name: each is evaluated alone, whatever the micro batch and the number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import metric_jobs
import pytest
import small_jobs
from job_documents import find_problems
from metric_jobs import Rare, expect, run_each
from ranks import run_ranks

from dsjob.errors import DataError

SIZES = {"many": 37, "few": 2, "one": 1}  # with 3 ranks, some have no batch of `few` and `one`
TRAIN = {"_target_": "metric_jobs.Rare"}
SETS = {name: {"_target_": "metric_jobs.Rare", "n": n, "seed": seed} for seed, (name, n) in enumerate(SIZES.items())}
F1 = {"f1": {"_target_": "metric_jobs.F1"}, "order": metric_jobs.METRICS["order"]}


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3), (3, 0), (3, 3)])
@pytest.mark.full("2-3", "3-0")
def test_each_set_has_its_own_f1(tmp_path: Path, world_size: int, stage: int) -> None:
    common = {"data": {"train": TRAIN, "eval": SETS}, "metrics": F1, "zero_optimization": {"stage": stage}}
    given = [{**common, "trainer": {"micro_batch": micro}} for micro in (16, 3)]
    for lines in run_ranks(run_each, world_size, str(tmp_path), given)[0]:
        last = lines[-1]
        assert {name.split("/")[1] for name in last if name != "step"} == set(SIZES)
        for seed, (name, n) in enumerate(SIZES.items()):
            expected = expect(Rare(n, seed))
            assert last[f"eval/{name}/f1"] == expected["own/f1"]
            assert last[f"eval/{name}/f1/positives"] == expected["own/positives"]
            assert last[f"eval/{name}/order"] == expected["order"]
            assert last[f"eval/{name}/loss"] > 0


def test_a_schedule_follows_the_loss_of_the_first_set(tmp_path: Path) -> None:
    small = {"_target_": "small_jobs.Data"}
    sections: dict[str, Any] = {
        "data": {"train": small, "eval": {"a": {**small, "n": 8}, "b": small}},
        "trainer": {"eval_every": 4},
        "scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 0}},
        "checkpoint": {"best": {"metric": "eval/b/loss"}},
    }
    small_jobs.train(tmp_path, **sections)
    assert "eval/b/loss" in (tmp_path / "metrics.jsonl").read_text()


def test_errors_name_the_set(tmp_path: Path) -> None:
    small = {"_target_": "small_jobs.Data"}
    with pytest.raises(DataError, match=r"data\.eval\.b") as told:
        small_jobs.train(tmp_path, data={"train": small, "eval": {"a": small, "b": {**small, "n": 0}}})
    assert told.value.path == ("data", "eval", "b", "_target_")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train": TRAIN, "eval": {"a b": TRAIN}}}, 'or the name of a set: .*, but is "a b"'),
        ({"data": {"train": TRAIN, "eval": {"a": 1}}}, "data.eval.a: must be an object, but is 1"),
        (
            {"data": {"train": TRAIN, "eval": SETS}, "checkpoint": {"best": {"mode": "max"}}},
            'unknown metric "eval/loss"; available: eval/few/f1, eval/few/loss',
        ),
    ],
)
def test_mistakes_in_sets_show_before_anything_runs(sections: dict[str, Any], message: str) -> None:
    problems = find_problems(metric_jobs.make_document("x", **{"metrics": F1, **sections}))
    assert any(re.search(message, str(problem)) for problem in problems), problems
