"""The order of samples is a function of seed and position alone, whatever the ranks and the size of the dataset."""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsjob.data import load_training
from dsjob.data.order import GroupedOrder, RankBatches, SampleOrder
from dsjob.errors import DataError
from dsjob.ranks.mesh import World

CPU = torch.device("cpu")


def epoch(order: SampleOrder, number: int) -> list[int]:
    return order.take(number * order.length, order.length)


@given(length=st.integers(1, 50), seed=st.integers(0, 1000), shuffle=st.booleans())
def test_an_epoch_is_every_sample_once(length: int, seed: int, shuffle: bool) -> None:
    order = SampleOrder(length, seed, shuffle)
    for number in range(3):
        assert sorted(epoch(order, number)) == list(range(length))
    assert order.take(0, 2 * length) == [*epoch(order, 0), *epoch(order, 1)]


@given(length=st.integers(1, 50), start=st.integers(0, 200), count=st.integers(0, 60))
def test_starting_late_skips_what_came_before(length: int, start: int, count: int) -> None:
    order = SampleOrder(length, 7, True)
    assert order.take(start, count) == order.take(0, start + count)[start:]


def test_shuffling_changes_with_seed_and_epoch() -> None:
    order = SampleOrder(100, 1, True)
    assert epoch(order, 0) != epoch(order, 1)
    assert epoch(order, 0) != epoch(SampleOrder(100, 2, True), 0)
    assert epoch(SampleOrder(100, 1, False), 3) == list(range(100))


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 12), (2, 6), (3, 4), (4, 3), (2, 3), (1, 4)])
def test_a_step_takes_the_same_samples_on_any_world_size(world_size: int, micro_batch: int) -> None:
    _compare_ranks(SampleOrder(31, 5, True), world_size, micro_batch)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_samples_of_a_large_dataset(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsjob.data.order._MOST_DRAWN", 7)
    order = SampleOrder(31, 5, True)
    assert sorted(epoch(order, 1)) == list(range(31))
    assert epoch(order, 1) != epoch(order, 2)
    _compare_ranks(order, world_size, 12 // world_size)


def _compare_ranks(order: SampleOrder, world_size: int, micro_batch: int) -> None:
    train_batch = 12
    accumulation = train_batch // world_size // micro_batch
    ranks = [
        iter(RankBatches(order, start=24, micro_batch=micro_batch, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for step in range(2, 9):
        seen = [index for _ in range(accumulation) for batches in ranks for index in next(batches)]
        assert seen == order.take(step * train_batch, train_batch)


LENGTHS = np.random.default_rng(0).integers(1, 1000, 3001)


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 12), (2, 3), (3, 4)])
def test_grouping_by_length_keeps_samples_of_similar_length_together(world_size: int, micro_batch: int) -> None:
    order = GroupedOrder(3001, 5, True, lengths=LENGTHS, train_batch=12)
    _compare_ranks(order, world_size, micro_batch)
    assert sorted(order.take(0, 600)) == sorted(SampleOrder(3001, 5, True).take(0, 600))
    assert sorted(order.take(600 - 7, 14)) == sorted(order.take(600 - 7, 7) + order.take(600, 7))

    def pad(batches: list[list[int]]) -> float:
        found = [LENGTHS[batch] for batch in batches]
        return float(1 - sum(batch.sum() for batch in found) / sum(batch.max() * len(batch) for batch in found))

    def read(of: SampleOrder) -> list[list[int]]:
        ranks = [iter(RankBatches(of, start=0, micro_batch=4, rank=rank, world_size=3)) for rank in range(3)]
        return [next(batches) for _ in range(250) for batches in ranks]

    assert pad(read(SampleOrder(3001, 5, True))) > 0.3  # the share of padding
    assert pad(read(order)) < 0.02
    means = [LENGTHS[order.take(12 * step, 12)].mean() for step in range(50)]
    assert means[0] == max(means)
    assert abs(np.corrcoef(means[1:], range(49))[0, 1]) < 0.5  # shuffled, not sorted


def test_grouping_by_length_needs_lengths() -> None:
    class Short(list[int]):
        lengths = (1, 2)

    def load(dataset: object) -> None:
        load_training(
            dataset, micro_batch=1, world=World(data_rank=0, local_rank=0, data_size=1, device=CPU), seed=0, grouped=2
        )

    for dataset, message in (
        ([1, 2, 3], r"data.train \(list\) does not tell them"),
        (Short([1, 2, 3]), r"data.train \(Short\) has 3 samples, but 2 lengths"),
        ({1, 2}, r"needs a dataset with a length; data.train \(set\) is iterable"),
    ):
        with pytest.raises(DataError, match=message):
            load(dataset)


def test_a_run_starts_anywhere_in_a_billion_samples() -> None:
    def begin() -> list[int]:
        order = SampleOrder(10**9, 1, True)
        return next(iter(RankBatches(order, start=5 * 10**8, micro_batch=8, rank=1023, world_size=1024)))

    began = time.process_time()
    begin()
    assert time.process_time() - began < 0.05
    tracemalloc.start()
    found = begin()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(found)) == 8
    assert peak < 100_000
