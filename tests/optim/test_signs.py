"""What one rank alone can say of the mean that travels as signs."""

from __future__ import annotations

import pytest

from dsjob.optim.onebit import signs


@pytest.mark.parametrize(
    ("elements", "ranks", "width"),
    [(1, 1, 8), (8, 1, 8), (9, 1, 16), (16, 2, 8), (17, 2, 16), (1, 4, 8), (1000, 3, 336)],
)
def test_a_chunk_is_whole_bytes_and_no_longer_than_it_has_to_be(elements: int, ranks: int, width: int) -> None:
    assert signs.chunk_width(elements, ranks) == width
    assert width * ranks >= elements > (width - 8) * ranks or width == 8
