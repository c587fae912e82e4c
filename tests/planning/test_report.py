"""How bytes are shown."""

from __future__ import annotations

import pytest

from dsjob.planning.report import Activations, show_bytes


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (1610612736, "1.5 GiB"),
        (80 << 30, "80 GiB"),
        (5 << 50, "5,120 TiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(size: int, shown: str) -> None:
    assert show_bytes(size) == shown


def test_checkpointed_activations_hold_one_block_that_is_computed_again() -> None:
    assert Activations(100, 20, 30).with_checkpointing == 50
    assert Activations(100).with_checkpointing is None


def test_what_counts_is_what_the_document_asks_for() -> None:
    assert Activations(100, 20, 30).asked == 100
    assert Activations(100, 20, 30, on=True).asked == 50
    assert Activations(100, on=True).asked == 100
    assert Activations(on=True).asked is None
