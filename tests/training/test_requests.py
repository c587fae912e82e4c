"""What callbacks and the file `stop-now` ask of a run: an end, a save, an evaluation. One rank's wish is all ranks'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from small_jobs import list_steps, make_document, read_losses, run, train

from dsjob.errors import UsageError
from dsjob.ranks.mesh import World


def ask(folder: Path, ranks: int, hook: str, step: int, **wishes: Any) -> dict[str, Any]:
    """The result of a job with a callback that asks for that; its steps in "steps", its evaluations in "evals"."""
    run_ranks(ask_on_ranks, ranks, str(folder), {"hook": hook, "step": step, **wishes})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evals = [line["step"] for line in lines if "eval/loss" in line]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result | {"steps": list(read_losses(folder)), "evals": evals, "saves": list_steps(folder)}


def ask_on_ranks(world: World, folder: str, arguments: dict[str, Any]) -> None:
    asking = {"_target_": "asking.Asking", **arguments}
    data = {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 12}}
    callbacks = {"asking": asking}
    run(make_document(folder, data=data, callbacks=callbacks, trainer={"eval_every": 4}), world)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("hook", "step", "last"), [("on_log", 3, 3), ("on_eval", 4, 4), ("on_log", 4, 4)])
@pytest.mark.full("on_log-3-3-1", "on_log-4-4-1", "on_eval-4-4-1", "on_log-4-4-2")
def test_a_stop_ends_the_run_with_an_evaluation_and_a_save(
    tmp_path: Path, ranks: int, hook: str, step: int, last: int
) -> None:
    result = ask(tmp_path, ranks, hook, step, stop="it is enough")
    assert (result["status"], result["step"], result["stopped"]) == ("done", last, "it is enough")
    assert result["steps"] == list(range(1, last + 1))
    assert (result["evals"], result["saves"]) == ([last], [last])
    assert "eval/loss" in result["metrics"]
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(ranks)] == [str(last)] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_from_other_hooks_holds_for_all_ranks(tmp_path: Path, ranks: int) -> None:
    result = ask(tmp_path, ranks, "on_step", 2, stop="it is enough")
    assert result["stopped"] == "it is enough"
    # With several ranks: when they agree for the next time, at the latest with the next record.
    assert 2 <= result["step"] <= 3
    assert result["saves"] == [result["step"]] == result["evals"]


def test_a_stopped_run_is_resumed_by_the_next_one(tmp_path: Path) -> None:
    ask(tmp_path, 1, "on_log", 3, stop="it is enough")
    result = ask(tmp_path, 1, "on_log", 9, stop="never")
    assert (result["stopped"], result["step"], result["steps"]) == ("", 8, list(range(1, 9)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_and_an_evaluation_are_made_when_asked_for(tmp_path: Path, ranks: int) -> None:
    result = ask(tmp_path, ranks, "on_log", 3, save=True, evaluate=True)
    assert (result["stopped"], result["step"]) == ("", 8)
    assert (result["evals"], result["saves"]) == ([3, 4, 8], [3, 8])


def test_a_stop_before_the_first_step_trains_nothing(tmp_path: Path) -> None:
    run_ranks(ask_on_ranks, 2, str(tmp_path), {"hook": "on_start", "step": 0, "stop": "not today"})
    assert not read_losses(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["stopped"] == "not today"


def test_an_evaluation_cannot_be_requested_without_data(tmp_path: Path) -> None:
    callbacks = {"asking": {"_target_": "asking.Asking", "hook": "on_log", "step": 1, "evaluate": True}}
    with pytest.raises(UsageError, match=r"no data\.eval"):
        run(make_document(tmp_path, callbacks=callbacks))


LONG = {"max_steps": 200}


def touch_on_ranks(world: World, folder: str) -> None:
    run(make_document(folder, callbacks={"touching": {"_target_": "asking.Touching"}}, trainer=LONG), world)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.full("1")
def test_the_file_stop_now_ends_the_run(tmp_path: Path, ranks: int) -> None:
    run_ranks(touch_on_ranks, ranks, str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["stopped"] == "the file stop-now was created"
    assert 4 <= result["step"] < 200
    assert list_steps(tmp_path) == [result["step"]]
    assert not (tmp_path / "stop-now").exists()
    train(tmp_path, trainer=LONG)
    assert list(read_losses(tmp_path)) == list(range(1, 201))
