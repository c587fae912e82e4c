"""Training batches that know their place, and evaluation that ends together on all ranks."""

import dataclasses
import os
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from job_documents import make_job, resolve
from torch.utils.data import IterableDataset, Subset

from dsjob.contract.spec import JobSpec, view
from dsjob.data import Epochs, EvaluationBatches, load_training, to_device
from dsjob.data.batches import count_elements, count_samples, is_tokens
from dsjob.data.loader import choose_loading
from dsjob.data.samples import Samples
from dsjob.errors import DataError
from dsjob.ranks.mesh import World

CPU = torch.device("cpu")


def make_world(rank: int = 0, world_size: int = 1) -> World:
    return World(data_rank=rank, local_rank=rank, data_size=world_size, device=CPU)


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def first_batches(dataset: Any, count: int, seek: int = 0, **options: Any) -> list[list[int]]:
    loader = load_training(dataset, **{"micro_batch": 4, "world": make_world(), "seed": 3, **options})
    loader.seek(seek)
    return [batch.tolist() for batch in islice(iter(loader), count)]


@pytest.mark.parametrize("dataset", [list(range(10)), Stream(10)], ids=["map", "iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_seeking_gives_the_batches_that_follow(dataset: Any, workers: int) -> None:
    whole = first_batches(dataset, 7, num_workers=workers)
    assert first_batches(dataset, 4, seek=12, num_workers=workers) == whole[3:]


def test_a_map_dataset_is_used_up_before_it_begins_again() -> None:
    batches = first_batches(list(range(10)), 5)
    flat = [sample for batch in batches for sample in batch]
    assert sorted(flat[:10]) == list(range(10)) == sorted(flat[10:])


def test_ranks_of_an_iterable_dataset_take_turns() -> None:
    ranks = [first_batches(Stream(16), 2, world=make_world(rank, 2)) for rank in range(2)]
    assert ranks == [[[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]]


def test_loading_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first_batches(list(range(10)), 2)
    assert torch.equal(before, torch.get_rng_state())


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [([], "is empty"), (7, "not a dataset"), (Unsized(), "no __len__"), (Stream(0), "no full batch")],
)
def test_what_cannot_be_trained_on_is_refused_by_name(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"data.train.*{message}"):
        first_batches(dataset, 1)


@pytest.mark.parametrize("length", [1, 4, 5, 9, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_weighs_every_sample_once_in_equally_many_rounds(length: int, world_size: int) -> None:
    per_rank = [
        list(
            EvaluationBatches(
                list(range(length)), micro_batch=2, world=make_world(rank, world_size), collate=None, max_batches=None
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    counted = [sample for batches in per_rank for batch, weight in batches if weight for sample in batch.tolist()]
    assert sorted(counted) == list(range(length))
    assert all(weight in (0, len(batch)) for batches in per_rank for batch, weight in batches)


@pytest.mark.parametrize(("world_size", "expected"), [(1, [0, 33]), (2, [0, 15, 33, 48])])
def test_limited_evaluation_is_spread_over_the_dataset(world_size: int, expected: list[int]) -> None:
    firsts = []
    for rank in range(world_size):
        world = make_world(rank, world_size)
        pairs = EvaluationBatches(list(range(66)), micro_batch=3, world=world, collate=None, max_batches=2)
        firsts += [int(batch[0]) for batch, weight in pairs if weight]
    assert sorted(firsts) == expected


def test_a_stream_is_evaluated_from_its_beginning() -> None:
    pairs = EvaluationBatches(Stream(100), micro_batch=3, world=make_world(), collate=None, max_batches=2)
    assert [batch.tolist() for batch, _ in pairs] == [[0, 1, 2], [3, 4, 5]]


def test_batches_are_counted_and_moved_in_any_shape() -> None:
    tokens = torch.zeros(3, 5, dtype=torch.long)
    assert (count_samples({"ids": tokens}), count_elements((tokens, 1)), is_tokens([tokens])) == (3, 15, True)
    assert is_tokens({"x": torch.zeros(3, 5)}) is False
    moved = to_device({"a": [tokens, ("text", tokens)]}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0] == "text"
    assert moved["a"][1][1].is_meta


class Random:
    """Each look at a sample gives another number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def test_random_transforms_in_workers_depend_on_the_sample_alone() -> None:
    (whole,) = [first_batches(Random(), 4, num_workers=1)]
    assert first_batches(Random(), 2, seek=8, num_workers=2) == whole[2:]
    ranks = [first_batches(Random(), 4, world=make_world(r, 2), micro_batch=2, num_workers=1) for r in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole
    assert whole[0] != whole[2]


class AtOnce(Random):
    """Reads several samples at once, and notes each time of what they are."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[float]:
        self.read.append(indices)
        return torch.rand(len(indices)).tolist()


def test_numbered_samples_are_read_at_once_where_the_dataset_can() -> None:
    dataset = AtOnce()
    samples = Samples(dataset, None, "data.train", 3)
    first, second = (samples.read_numbered([(5, number), (2, number + 1)]) for number in (8, 9))
    assert dataset.read == [[5, 2]] * 2
    assert first == samples.read_numbered([(1, 8), (0, 9)]) != second


def test_a_subset_reads_at_once_only_what_its_dataset_does() -> None:
    """Else random transforms would depend on the micro batch."""
    alone, whole = (Samples(Subset(made, range(8)), None, "data.train") for made in (Random(), AtOnce()))
    numbered = [(5, 8), (2, 9)]
    assert alone.read_numbered(numbered)[1:] == alone.read_numbered(numbered[1:])
    assert whole.read_numbered(numbered)[1:] != whole.read_numbered(numbered[1:])


def test_a_program_sees_epochs() -> None:
    loader = load_training(list(range(10)), micro_batch=3, world=make_world(), seed=0)
    epochs = Epochs(loader, 3)
    first, second = [[batch.tolist() for batch in epochs] for _ in range(2)]
    assert len(epochs) == len(first) == len(second) == 3
    assert first != second
    stream = Epochs(load_training(Stream(7), micro_batch=2, world=make_world(), seed=0), 2)
    assert [batch.tolist() for batch in stream] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(TypeError):
        len(stream)


class Fleeting(Sequence[int]):
    """A dataset that tells in which process it is read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor([index, os.getpid()])


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_ahead_in_workers(workers: int) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batches = EvaluationBatches(
        Fleeting(), micro_batch=3, world=make_world(), collate=None, max_batches=None, num_workers=workers
    )
    for _ in range(2):
        found = [batch for batch, _ in batches]
        assert torch.cat(found)[:, 0].tolist() == list(range(10))
        assert (os.getpid() in torch.cat(found)[:, 1].tolist()) == (workers == 0)
    assert torch.equal(torch.get_rng_state(), before)  # training draws what it would have drawn


@pytest.mark.parametrize(
    ("said", "device", "dataset", "expected"),
    [
        (None, "cpu", [1], {"num_workers": 0, "pin_memory": False}),
        (None, "cuda", [1], {"num_workers": 2, "pin_memory": True}),
        (None, "cuda", Stream(3), {"num_workers": 0, "pin_memory": True}),
        (0, "cuda", [1], {"num_workers": 0, "pin_memory": True}),
        (5, "cpu", [1], {"num_workers": 5, "pin_memory": False}),
    ],
)
def test_workers_read_ahead_on_a_gpu(said: int | None, device: str, dataset: Any, expected: dict[str, Any]) -> None:
    data = {"train": {"_target_": "data.Data"}, **({} if said is None else {"num_workers": said})}
    spec = view(JobSpec, resolve(make_job(data=data)))
    assert (
        choose_loading(spec.data, dataset, dataclasses.replace(make_world(), device=torch.device(device))) == expected
    )


def test_the_first_batches_of_a_huge_set_cost_no_list_of_its_indices() -> None:
    tracemalloc.start()
    pairs = iter(EvaluationBatches(range(10**9), micro_batch=4, world=make_world(1, 3), collate=None, max_batches=None))
    found = [(batch.tolist(), samples) for batch, samples in islice(pairs, 2)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [([4, 5, 6, 7], 4), ([16, 17, 18, 19], 4)]
    assert peak < 1 << 20
