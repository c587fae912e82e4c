"""Early stopping: which evaluations count, what a stopped run leaves, and that it stays stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from small_jobs import list_steps, make_document, read_losses, run

from dsjob.callbacks import EarlyStopping
from dsjob.errors import ContractError, DocumentError, DsjobError
from dsjob.ranks.mesh import World


class Seen:
    """A run that notes why it is to stop."""

    def __init__(self) -> None:
        self.step, self.reason = 0, ""

    def request_stop(self, reason: str) -> None:
        self.reason = reason


def stop_after(values: list[float], **arguments: Any) -> int:
    """The number of evaluations after which training stops; 0 if it does not."""
    callback, seen = EarlyStopping(**arguments), Seen()
    for number, value in enumerate(values, 1):
        seen.step = number
        callback.on_eval(seen, {"eval/loss": value})  # type: ignore[arg-type]
        if seen.reason:
            return number
    return 0


def test_it_stops_after_evaluations_without_improvement() -> None:
    assert stop_after([3.0, 2.0, 2.5, 2.0, 1.0, 1.0, 1.5], patience=3) == 0
    assert stop_after([3.0, 2.0, 2.5, 2.0, 2.5, 1.0], patience=3) == 5
    assert stop_after([1.0, 2.0, 1.5, 3.0], patience=2, mode="max") == 0
    assert stop_after([2.0, 1.0, 1.5], patience=2, mode="max") == 3
    assert stop_after([3.0, 2.9, 2.8], patience=2) == 0
    assert stop_after([3.0, 2.9, 2.8], patience=2, min_delta=0.3) == 3
    assert stop_after([float("nan"), float("nan"), 1.0], patience=2) == 2


@pytest.mark.parametrize("arguments", [{"patience": 0}, {"min_delta": -1.0}, {"mode": "best"}])
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        EarlyStopping(**arguments)


def stopping(folder: Path, steps: int = 8, **arguments: Any) -> dict[str, Any]:
    """A job that is evaluated every second step, and of which no evaluation counts as better than the first."""
    given = {"_target_": "dsjob.callbacks.EarlyStopping", "min_delta": 1000.0, **arguments}
    data = {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 12}}
    trainer = {"eval_every": 2, "max_steps": steps}
    return make_document(folder, data=data, trainer=trainer, callbacks={"early": given}, checkpoint={"every": 1})


def stop_on_ranks(world: World, folder: str) -> None:
    run(stopping(Path(folder), patience=2), world)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_is_evaluated_and_saved_and_stays_stopped(tmp_path: Path, ranks: int) -> None:
    run_ranks(stop_on_ranks, ranks, str(tmp_path))
    assert list(read_losses(tmp_path)) == [1, 2, 3, 4, 5, 6]  # evaluations at 2 (best), 4 and 6
    assert list_steps(tmp_path)[-1] == 6
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"]) == ("done", 6)
    assert result["stopped"].startswith("eval/loss has not improved in 2 evaluations; the best value was ")
    assert result["stopped"].endswith(" at step 2")
    run_ranks(stop_on_ranks, ranks, str(tmp_path))
    assert list(read_losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_more_patience_continues_the_run(tmp_path: Path) -> None:
    run(stopping(tmp_path, patience=1))
    assert list(read_losses(tmp_path))[-1] == 4
    run(stopping(tmp_path, patience=2))
    assert list(read_losses(tmp_path))[-1] == 6


def test_an_unknown_metric_is_told_with_those_that_exist(tmp_path: Path) -> None:
    callback = EarlyStopping(metric="eval/f1")  # from trainer.eval_step, whose names are known only now
    with pytest.raises(DsjobError, match="no metric eval/f1") as told:
        callback.on_eval(Seen(), {"eval/loss": 1.0})  # type: ignore[arg-type]
    assert told.value.hint == "available: eval/loss"


def test_a_metric_that_is_not_declared_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r'callbacks\.early\.metric: unknown metric "eval/los"') as told:
        run(stopping(tmp_path, metric="eval/los"))
    assert told.value.problems[0].hint == 'did you mean "eval/loss"? available: eval/loss'


def test_a_job_without_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"add data\.eval"):
        run(make_document(tmp_path, callbacks={"early": {"_target_": "dsjob.callbacks.EarlyStopping"}}))
    assert not read_losses(tmp_path)
