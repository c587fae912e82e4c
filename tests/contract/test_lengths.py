"""Lengths with a unit: what they stand for, and what is said of those that nobody can read."""

from __future__ import annotations

from typing import Any

import pytest
from job_documents import find_problems, make_job, resolve

from dsjob.contract.lengths import Length, read_length, suggest_length
from dsjob.contract.spec import JobSpec, view


@pytest.mark.parametrize(
    ("value", "amount", "unit"),
    [
        (7, 7, "steps"),
        ("100ba", 100, "steps"),
        ("2.5ep", 2.5, "epochs"),
        ("1e6tok", 1e6, "tokens"),
        ("30min", 1800, "seconds"),
        ("1e-1h", 360, "seconds"),
        ("90sec", 90, "seconds"),
        ("512sp", 512, "samples"),
    ],
)
def test_what_a_length_stands_for(value: Any, amount: float, unit: Any) -> None:
    assert read_length(value) == Length(amount, unit, str(value))
    resolved = resolve(make_job(trainer={"max_length": value, "train_batch": 8}))
    assert view(JobSpec, resolved).trainer.max_length == read_length(value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("2 epochs", "write 2ep"),
        ("30m", "write 30min"),
        ("100 batches", "write 100ba"),
        ("1_000_000 tokens", "write 1000000tok"),
        ({"epochs": 2}, "write 2ep"),  # as in Determined
        ({"records": 100}, "write 100sp"),
        ("100", "write 100 without the quotes"),
        ("2weeks", ""),
        ("1h30min", ""),
        ("auto", ""),
        ("0ep", ""),
        ("0.0e5tok", ""),
        ("-2ep", ""),
        (True, ""),
        (0.5, ""),
    ],
)
@pytest.mark.parametrize("key", ["trainer.max_length", "trainer.eval_every", "checkpoint.every"])
def test_a_length_that_nobody_can_read(key: str, value: Any, hint: str) -> None:
    section, name = key.split(".")
    job = make_job(data={"train": {"_target_": "a.b"}, "eval": {"_target_": "a.b"}})
    job[section] = {**job.get(section, {}), name: value}
    (problem,) = find_problems(job)
    assert (problem.dotted, problem.hint) == (key, hint)
    assert "a number of steps, or a length with a unit such as 100ba, 2ep" in problem.message
    assert suggest_length(value) == hint
