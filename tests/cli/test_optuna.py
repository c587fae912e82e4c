"""The usual Optuna command line: `dsjob -m ... hydra/sweeper=optuna 'optimizer.params.lr=interval(1e-4,1e-1)'`."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import dsjob, make_job

from dsjob.cli.sweep import _read_objective, _settle_optuna
from dsjob.document.compose import take_first
from dsjob.errors import ContractError, UsageError

needs_optuna = pytest.mark.skipif(
    "hydra-optuna-sweeper" not in {found.metadata["Name"] for found in importlib.metadata.distributions()},
    reason="needs hydra-optuna-sweeper: pip install '.[sweep]'",
)
OPTUNA = "hydra/sweeper=optuna"


@needs_optuna
def test_an_interval_is_searched_and_trials_that_fail_are_counted_as_failed(tmp_path: Path) -> None:
    best = {"metric": "eval/score", "mode": "max"}
    make_job(tmp_path, metrics={"score": {"_target_": "my_model.score"}}, checkpoint={"best": best})
    with (tmp_path / "my_model.py").open("a") as file:
        file.write("\ncalls = []\ndef score(outputs, batch):\n    return 5.0\n")
        file.write("def risky(dropout=0.0):\n    calls.append(1)\n    return 1 / (len(calls) - 2) and build(dropout)\n")
    done = dsjob(
        *("-m", "cfg.json", OPTUNA, "optimizer.params.lr=interval(1e-4,1e-1)", "hydra.sweeper.n_trials=3"),
        *("output.dir=sweep", "trainer.max_steps=1", "model._target_=my_model.risky"),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    results = [json.loads((tmp_path / f"sweep/{number}/result.json").read_text()) for number in range(3)]
    assert [result["status"] for result in results] == ["done", "failed", "done"]
    rates = [float(result["overrides"][0].partition("=")[2]) for result in results]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    found = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    assert found["best_value"] == 5.0  # checkpoint.best's metric, not the loss
    assert "run 1 failed: command line: model._target_=my_model.risky: model: ZeroDivisionError" in done.stdout


@needs_optuna
@pytest.mark.full
def test_a_study_without_a_completed_trial_shows_its_table(tmp_path: Path) -> None:
    make_job(tmp_path, model={"_target_": "my_model.Crash"})
    done = dsjob(
        *("-m", "cfg.json", OPTUNA, "optimizer.params.lr=tag(log,interval(1e-4,1e-1))", "hydra.sweeper.n_trials=2"),
        "output.dir=sweep",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "run 1 failed: ValueError: shapes do not fit" in done.stdout, done.stderr


def test_the_first_run_takes_the_start_of_an_interval() -> None:
    assert take_first(["a=interval(1,2)", "b=tag(log,interval(0.5,2))", "c=1,2", "d=3"]) == [
        "a=1.0",
        "b=0.5",
        "c=1",
        "d=3",
    ]


@pytest.mark.parametrize(
    ("best", "given", "chosen"),
    [
        (None, [], ["hydra.sweeper.direction=minimize", "hydra.sweeper.max_failure_rate=1"]),
        ({"mode": "max"}, [], ["hydra.sweeper.direction=maximize", "hydra.sweeper.max_failure_rate=1"]),
        ({"mode": "max"}, ["hydra.sweeper.direction=maximize"], ["hydra.sweeper.max_failure_rate=1"]),
        (None, ["hydra.sweeper.direction=maximize", "hydra.sweeper.max_failure_rate=0"], []),
        (None, ["hydra.sweeper.direction=[minimize,maximize]", "hydra.sweeper.max_failure_rate=0"], []),
    ],
)
def test_the_direction_is_that_of_the_best_checkpoint(best: Any, given: list[str], chosen: list[str]) -> None:
    assert _settle_optuna([OPTUNA, *given], {"checkpoint": {"best": best}}) == chosen
    assert _settle_optuna(given, {}) == []


def test_a_direction_that_contradicts_the_best_checkpoint_is_refused() -> None:
    with pytest.raises(UsageError, match=r"contradicts checkpoint\.best\.mode: max"):
        _settle_optuna([OPTUNA, "hydra.sweeper.direction=minimize"], {"checkpoint": {"best": {"mode": "max"}}})


def test_a_metric_that_does_not_say_which_values_are_better_needs_a_mode() -> None:
    document = {"checkpoint": {"best": {"metric": "eval/f1"}}}
    with pytest.raises(UsageError, match="whether lower or higher values of eval/f1 are better"):
        _settle_optuna([OPTUNA], document)
    given = [OPTUNA, "hydra.sweeper.direction=maximize"]
    assert _settle_optuna(given, document) == ["hydra.sweeper.max_failure_rate=1"]


def test_runs_are_compared_by_the_metric_of_the_best_checkpoint() -> None:
    result = {"metrics": {"loss": 1, "eval/loss": 2, "eval/f1": 3}}
    assert _read_objective({}, result) == 2
    assert _read_objective({}, {"metrics": {"loss": 1}}) == 1
    assert _read_objective({"checkpoint": {"best": {"metric": "eval/f1"}}}, result) == 3
    with pytest.raises(ContractError, match="eval/acc"):
        _read_objective({"checkpoint": {"best": {"metric": "eval/acc"}}}, result)
