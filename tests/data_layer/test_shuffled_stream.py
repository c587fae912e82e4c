"""Iterable datasets shuffled window by window: every sample once, in another order in each pass, resumed exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from typing import Any

import pytest
import torch
from test_stream import Plain, Sharded, Stateful, flatten, take

from dsjob.data import StreamLoader, load_training
from dsjob.errors import DataError
from dsjob.ranks.mesh import World

SAMPLES = 60


def make(dataset: Any, rank: int = 0, ranks: int = 1, *, buffer: int = 8, seed: int = 3, workers: int = 0) -> Any:
    world = World(data_rank=rank, local_rank=rank, data_size=ranks, device=torch.device("cpu"))
    return load_training(
        dataset, micro_batch=2, world=world, seed=seed, num_workers=workers, shuffle_buffer=buffer, shuffle=True
    )


def test_a_pass_has_each_sample_once_near_its_place_and_in_an_order_of_its_own() -> None:
    read = flatten(take(make(Plain(range(SAMPLES))), SAMPLES))
    passes = read[:SAMPLES], read[SAMPLES:]
    for found in passes:
        assert sorted(found) == list(range(SAMPLES))
        assert [sample // 8 for sample in found] == [place // 8 for place in range(SAMPLES)]  # windows of 8
        assert found != list(range(SAMPLES))
    assert passes[0] != passes[1]
    windows = [tuple(sample % 8 for sample in passes[0][start : start + 8]) for start in range(0, 56, 8)]
    assert len(set(windows)) == len(windows)
    assert flatten(take(make(Plain(range(SAMPLES)), seed=4), 30)) != passes[0]


def test_each_place_of_a_window_is_equally_likely() -> None:
    """First samples of 1,000 windows of 8: chi squared with 7 degrees of freedom is above 24.3 once in a thousand."""
    counts = [0] * 8
    for batch in islice(make(Plain(range(8_000))), 0, 4_000, 4):
        counts[int(batch[0]) % 8] += 1
    assert sum((count - 125) ** 2 / 125 for count in counts) < 24.3


def test_without_shuffle_the_order_is_the_datasets() -> None:
    world = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))
    loader = load_training(
        Plain(range(8)), micro_batch=2, world=world, seed=3, num_workers=0, shuffle_buffer=4, shuffle=False
    )
    assert isinstance(loader, StreamLoader)
    assert flatten(take(loader, 4)) == list(range(8))


KINDS: dict[str, Callable[[], Any]] = {
    "plain": partial(Plain, range(SAMPLES)),
    "stateful": partial(Stateful, range(SAMPLES)),
    "sharded": partial(Sharded, range(SAMPLES), 4),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full("plain-2", "stateful-2", "sharded-2")
def test_a_resume_at_any_batch_continues_the_same_order(kind: str, workers: int) -> None:
    """Also across the end of the pass, where the last window is shorter."""
    whole = take(make(KINDS[kind](), workers=workers), 40)
    for stop in range(1, 36, 15 if workers else 1):
        first = make(KINDS[kind](), workers=workers)
        begun = take(first, stop)
        again = make(KINDS[kind](), workers=workers)
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert begun + take(again, 40 - stop) == whole
        assert (again.describe_replay() is None) == (kind != "plain")


def test_a_resume_reads_only_the_window_again() -> None:
    first, dataset = make(Stateful(range(SAMPLES))), Stateful(range(SAMPLES))
    begun = take(first, 22)  # 44 samples: 4 of the sixth window
    again = make(dataset)
    again.load_state_dict(first.state_dict())
    rest = take(again, 8)
    assert dataset.read[:8] == list(range(40, 48))
    assert sorted(flatten(begun + rest)) == list(range(SAMPLES))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_number_of_ranks_loses_no_sample(ranks: int) -> None:
    firsts = [make(KINDS["sharded"](), rank, 2) for rank in range(2)]
    begun = [take(loader, 6) for loader in firsts]
    states = [loader.state_dict() for loader in firsts]
    agains = [make(KINDS["sharded"](), rank, ranks) for rank in range(ranks)]
    for loader in agains:
        loader.load_state_dicts(states)
    rest = [take(loader, 16 // ranks) for loader in agains]
    read = flatten(list(chain(*begun, *rest)))
    assert len(read) == 56
    assert len(set(read)) == 56


def test_another_buffer_takes_over_at_the_position() -> None:
    first = make(Stateful(range(SAMPLES)))
    begun = take(first, 8)  # two windows
    again = make(Stateful(range(SAMPLES)), buffer=20)
    again.load_state_dict(first.state_dict())
    assert sorted(flatten(begun + take(again, 22))) == list(range(SAMPLES))


def test_streams_of_hugging_face_resume_exactly() -> None:
    datasets = pytest.importorskip("datasets")
    mapped = datasets.Dataset.from_dict({"x": list(range(SAMPLES))})

    def build() -> Any:
        return make(mapped.to_iterable_dataset(num_shards=4))

    def read(loader: Any, count: int) -> list[list[int]]:
        return [batch["x"].tolist() for batch in islice(loader, count)]

    whole = read(build(), 40)
    for stop in (3, 4, 17, 30, 33):
        first = build()
        begun = read(first, stop)
        again = build()
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert begun + read(again, 40 - stop) == whole


def test_a_dataset_with_a_length_needs_no_buffer() -> None:
    with pytest.raises(DataError, match=r"data\.shuffle_buffer is for iterable datasets; data\.train \(list\) has a"):
        make(list(range(8)))
