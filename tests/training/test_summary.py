"""The rows that describe a run."""

from __future__ import annotations

import pytest

from dsjob.training.summary import _count_epochs


@pytest.mark.parametrize(("number", "text"), [(1.0, "1 epoch"), (0.5, "0.5 epochs"), (2.0, "2 epochs")])
def test_one_epoch_is_singular(number: float, text: str) -> None:
    assert _count_epochs(number) == text
