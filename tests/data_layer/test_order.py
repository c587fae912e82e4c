"""The order of samples is a function of seed and position alone, whatever the ranks."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjob.data.order import RankBatches, SampleOrder


def take(order: SampleOrder, start: int, count: int) -> list[int]:
    return list(islice(order.stream(start), count))


@given(length=st.integers(1, 50), seed=st.integers(0, 1000), shuffle=st.booleans())
def test_an_epoch_is_every_sample_once(length: int, seed: int, shuffle: bool) -> None:
    order = SampleOrder(length, seed, shuffle)
    for number in range(3):
        assert sorted(order.epoch(number)) == list(range(length))
    assert take(order, 0, 2 * length) == [*order.epoch(0), *order.epoch(1)]


@given(length=st.integers(1, 50), start=st.integers(0, 200), count=st.integers(0, 60))
def test_starting_late_skips_what_came_before(length: int, start: int, count: int) -> None:
    order = SampleOrder(length, 7, True)
    assert take(order, start, count) == take(order, 0, start + count)[start:]


def test_shuffling_changes_with_seed_and_epoch() -> None:
    order = SampleOrder(100, 1, True)
    assert list(order.epoch(0)) != list(order.epoch(1))
    assert list(order.epoch(0)) != list(SampleOrder(100, 2, True).epoch(0))
    assert list(SampleOrder(100, 1, False).epoch(3)) == list(range(100))


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 12), (2, 6), (3, 4), (4, 3), (2, 3), (1, 4)])
def test_a_step_takes_the_same_samples_on_any_world_size(world_size: int, micro_batch: int) -> None:
    order, train_batch = SampleOrder(31, 5, True), 12
    accumulation = train_batch // world_size // micro_batch
    ranks = [
        iter(RankBatches(order, start=24, micro_batch=micro_batch, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for step in range(2, 9):
        seen = [index for _ in range(accumulation) for batches in ranks for index in next(batches)]
        assert seen == take(order, step * train_batch, train_batch)
