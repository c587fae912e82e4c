"""The packing of signs, and what one rank alone can say of the mean that travels as them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsjob.optim.onebit import signs


@pytest.mark.parametrize("shape", [(8,), (64,), (3, 40), (0,)])
def test_bits_are_numpys_with_the_first_element_lowest_and_come_back(shape: tuple[int, ...]) -> None:
    given = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = signs._pack(given)
    assert packed.dtype == torch.uint8
    assert np.array_equal(packed.numpy(), np.packbits(given.numpy(), axis=-1, bitorder="little"))
    assert torch.equal(signs._unpack(packed), given)


@pytest.mark.parametrize(
    ("elements", "ranks", "width"),
    [(1, 1, 8), (8, 1, 8), (9, 1, 16), (16, 2, 8), (17, 2, 16), (1, 4, 8), (1000, 3, 336)],
)
def test_a_chunk_is_whole_bytes_and_no_longer_than_it_has_to_be(elements: int, ranks: int, width: int) -> None:
    assert signs.chunk_width(elements, ranks) == width
    assert width * ranks >= elements > (width - 8) * ranks or width == 8
