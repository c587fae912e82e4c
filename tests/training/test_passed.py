"""Lengths with a unit: where a run ends, and when it logs, evaluates and saves, on any number of ranks and resumed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_jobs
import token_jobs
from ranks import run_ranks
from small_jobs import list_steps

from dsjob.contract.lengths import read_length
from dsjob.errors import ContractError, DataError
from dsjob.ranks.mesh import World
from dsjob.training import job
from dsjob.training.passed import Passed, crosses

TOKENS = 8 * token_jobs.LENGTH  # of a step: 72; an epoch has 3 steps of 8 samples


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("3ba", [3, 6, 9]),
        ("2ep", [6]),  # of 24 samples
        ("0.5ep", [2, 3, 5, 6, 8, 9]),
        ("20sp", [3, 5, 8]),
        ("8sp", list(range(1, 10))),
        ("200tok", [3, 6, 9]),
        ("1.5e2tok", [3, 5, 7, 9]),
    ],
)
def test_a_period_ends_at_the_first_step_that_reaches_a_multiple(text: str, steps: list[int]) -> None:
    engine: Any = SimpleNamespace(global_steps=0, global_samples=0, rhythm=SimpleNamespace(train_batch=8))
    world: Any = SimpleNamespace(everyone=SimpleNamespace(size=1))
    length = read_length(text)
    lengths = SimpleNamespace(max_length=None, log_every=length, eval_every=length)
    spec: Any = SimpleNamespace(trainer=lengths, checkpoint=SimpleNamespace(every=length))
    passed, found = Passed(spec, 24), []
    for step in range(1, 10):
        engine.global_steps, engine.global_samples = step, 8 * step
        passed.count_tokens(TOKENS, world)
        passed.end_step(None)
        found += [step] * passed.ends_period(length, engine)
    assert found == steps


def test_a_period_of_many_small_steps_is_not_lost_to_rounding() -> None:
    assert sum(crosses(0.1, step / 100, (step + 1) / 100) for step in range(1000)) == 100


SECTIONS = {
    "trainer": {"max_length": "500tok", "log_every": "16sp", "eval_every": "150tok"},
    "checkpoint": {"every": "1ep", "keep": 0},
    "callbacks": None,
}


def run_on_ranks(world: World, folder: str, sections: dict[str, Any], **trainer: Any) -> None:
    document = token_jobs.make_document(folder, micro_batch=2, **sections)
    document["trainer"] = {**{k: v for k, v in document["trainer"].items() if k != "max_steps"}, **trainer}
    token_jobs.run(document, world)


def read_course(folder: Path) -> tuple[int, list[int], list[int], list[int], dict[str, Any]]:
    """The last step of a run, its evaluations, its saves, its log records, and the losses by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step = json.loads((folder / "result.json").read_text())["step"]
    evals = [line["step"] for line in lines if "eval/loss" in line]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return step, evals, list_steps(folder), list(losses), losses


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_a_run_counts_the_tokens_of_all_ranks(tmp_path: Path, ranks: int, stage: int) -> None:
    run_ranks(run_on_ranks, ranks, str(tmp_path), {**SECTIONS, "zero_optimization": {"stage": stage}})
    step, evals, saves, logs, _ = read_course(tmp_path)
    assert step == 7  # 504 tokens
    assert evals == [3, 5, 7]  # 216 (150), 360 (300), 504 (450)
    assert saves == [3, 6, 7]
    assert logs == [2, 3, 4, 5, 6, 7]  # and with each evaluation and save


def test_a_resumed_run_ends_and_evaluates_where_one_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after step 6, which was saved in the middle of a period of tokens, and started again on two ranks."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(run_on_ranks, 1, str(whole), SECTIONS)
    shorter = {**SECTIONS, "trainer": {**SECTIONS["trainer"], "max_length": "400tok"}}
    run_ranks(run_on_ranks, 1, str(parts), shorter)
    assert read_course(parts)[0] == 6
    run_ranks(run_on_ranks, 2, str(parts), SECTIONS)
    step, evals, saves, logs, losses = read_course(parts)
    assert (step, saves, logs) == read_course(whole)[:1] + read_course(whole)[2:4]
    assert evals == [3, 5, 6, 7]  # step 6 was the last one
    assert losses == pytest.approx(read_course(whole)[4], rel=1e-5)
    before = (parts / "metrics.jsonl").read_text()
    document = token_jobs.make_document(str(parts), micro_batch=2, **SECTIONS)
    del document["trainer"]["max_steps"]
    token_jobs.run(document)
    told = capsys.readouterr().out
    assert "step 7 of 7: nothing was trained" in told
    assert "set trainer.max_length=1000tok" in told
    assert (parts / "metrics.jsonl").read_text() == before


def test_time_ends_a_run_and_goes_on_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 20 s by a clock that the test turns: after each log record, which every step has."""
    now = [0.0]

    def turn(run: Any, step: int) -> None:
        now[0] += 20

    monkeypatch.setattr(job, "Passed", functools.partial(Passed, clock=lambda: now[0]))
    monkeypatch.setattr(small_jobs, "MORE", [turn])
    data = {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 8}}
    document = small_jobs.make_document(tmp_path, data=data, checkpoint={"every": "0.5min", "keep": 0})
    document["trainer"] = {"train_batch": 8, "max_length": "1min", "log_every": 1, "eval_every": "40sec"}
    small_jobs.run(document)
    # After step n, 20 (n - 1) seconds have passed.
    assert read_course(tmp_path)[:3] == (4, [3, 4], [3, 4])
    now[0] += 3600  # between the runs
    document["trainer"]["max_length"] = "2min"
    small_jobs.run(document)
    # After step 4 + n, 60 + 20 (n - 1) seconds have passed: 80 after step 6, 90 before step 7, 120 after step 8.
    assert read_course(tmp_path)[:3] == (8, [3, 4, 6, 8], [3, 4, 7, 8])


def end_by_time(world: World, folder: str) -> None:
    document = small_jobs.make_document(folder, zero_optimization={"stage": 3})
    document["trainer"] = {"train_batch": 8, "max_length": "0.7sec", "log_every": "0.2sec"}
    small_jobs.run(document, world)


def test_ranks_end_by_time_together(tmp_path: Path) -> None:
    run_ranks(end_by_time, 2, str(tmp_path))
    step, _, saves, logs, _ = read_course(tmp_path)
    assert saves == [step] == logs[-1:]


def test_lengths_that_the_data_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="counts tokens, but the batches have none"):
        small_jobs.train(tmp_path / "a", trainer={"eval_every": 0, "log_every": "10tok"})
    stream = {"train": {"_target_": "small_jobs.Parts", "num_shards": 1}}
    with pytest.raises(DataError, match="2ep needs a dataset with a length") as caught:
        small_jobs.train(tmp_path / "b", data=stream, checkpoint={"every": "2ep"})
    assert caught.value.path == ("checkpoint", "every")
