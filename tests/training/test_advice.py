"""Advice for the user of a run."""

from __future__ import annotations

import pytest

from dsjob.training.advice import note_few_samples


@pytest.mark.parametrize(("samples", "train_batch"), [(None, 8), (8, 8), (9, 8)])
def test_enough_samples_need_no_note(samples: int | None, train_batch: int) -> None:
    assert note_few_samples(samples, train_batch) == ""


def test_fewer_samples_than_a_step_takes_are_told_with_both_numbers() -> None:
    told = note_few_samples(10, 64)
    assert told == "data.train has 10 samples, fewer than train_batch 64: every step repeats some of them"
