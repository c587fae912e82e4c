"""Loaders of the user's own: used as they are, begun again at the right batch, shared among ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.sampler import WeightedRandomSampler

from dsjob.data import Epochs, EvaluationBatches, LoaderEvaluation, is_loader, load_training, take_loader
from dsjob.data.given import StatefulLoader
from dsjob.data.passes import Passes
from dsjob.errors import DataError
from dsjob.ranks.mesh import World

NUMBERS = list(range(10))


def make_world(rank: int = 0, world_size: int = 1) -> World:
    return World(data_rank=rank, local_rank=rank, data_size=world_size, device=torch.device("cpu"))


def first_batches(loader: Any, count: int, seek: int = 0, micro_batch: int = 2, **options: Any) -> list[list[int]]:
    taken = take_loader(loader, **{"micro_batch": micro_batch, "world": make_world(), "seed": 3, **options})
    taken.seek(seek)
    return [batch.tolist() for batch in islice(iter(taken), count)]


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Batches:
    """A loader without a length, of a class that torch does not know."""

    batch_size = 2

    def __init__(self, *batches: list[int]) -> None:
        self.dataset = self.batches = [torch.tensor(batch) for batch in batches]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Counting(Batches):
    """A loader that can go on from its own state, and says how many batches it has read."""

    def __init__(self, *batches: list[int]) -> None:
        super().__init__(*batches)
        self.given = self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches[self.given :]:
            self.given, self.read = self.given + 1, self.read + 1
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_loaders_are_told_from_datasets() -> None:
    loaders = [DataLoader(NUMBERS), DataLoader(Stream(3)), Batches([1]), Epochs(make_training(), 1)]
    assert [is_loader(loader) for loader in loaders] == [True] * 4
    assert not any(map(is_loader, [NUMBERS, Stream(3), TensorDataset(torch.zeros(2)), {"batch_size": 3}]))


def make_training() -> Any:
    return load_training(NUMBERS, micro_batch=1, world=make_world(), seed=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_used_as_it_is_and_begun_again(workers: int) -> None:
    loader = DataLoader(NUMBERS, batch_size=2, drop_last=True, num_workers=workers, collate_fn=negate)
    assert first_batches(loader, 6) == [[0, -1], [-2, -3], [-4, -5], [-6, -7], [-8, -9], [0, -1]]


def negate(samples: list[int]) -> torch.Tensor:
    return -torch.tensor(samples)


LOADERS = {
    "shuffled": lambda: DataLoader(NUMBERS, batch_size=2, shuffle=True),
    "own generator": lambda: DataLoader(
        NUMBERS, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "weighted": lambda: DataLoader(NUMBERS, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "batch sampler": lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 2, False)),
    "distributed": lambda: DataLoader(
        NUMBERS, batch_size=2, sampler=DistributedSampler(NUMBERS, num_replicas=1, rank=0)
    ),
    "no batches": lambda: DataLoader(torch.arange(10).reshape(5, 2), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(10), batch_size=2),
    "unknown": lambda: Batches([1, 2], [3, 4], [5, 6]),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_run_gets_the_batches_that_follow(kind: str) -> None:
    torch.manual_seed(1)
    whole = first_batches(LOADERS[kind](), 12)
    torch.manual_seed(2)  # of another process: what the global generator gives has no say
    assert first_batches(LOADERS[kind](), 5, seek=14) == whole[7:]
    if kind not in ("stream", "unknown", "weighted"):
        first, second = ([sample for batch in whole[start : start + 5] for sample in batch] for start in (0, 5))
        assert sorted(first) == sorted(second) == NUMBERS
        assert whole[:5] != whole[5:10]


def test_seeking_reads_no_sample_that_was_used() -> None:
    looked: list[int] = []

    class Watched(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            looked.append(index)
            return index

    assert first_batches(DataLoader(Watched(), batch_size=2), 1, seek=6) == [[6, 7]]
    assert looked == [6, 7]


class Slow(Batches):
    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            time.sleep(0.01)
            yield batch


def test_a_replay_is_announced_and_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsjob.data.replay.EVERY", 0.05)
    told: list[str] = []
    taken = take_loader(Slow(*([n, n] for n in range(40))), micro_batch=2, world=make_world(), seed=0)
    assert taken.describe_replay() is None
    taken.seek(60)
    taken.say = told.append
    assert "reading 60 samples of data.train (Slow) again, because it is no plain DataLoader" in (
        taken.describe_replay() or ""
    )
    assert next(iter(taken)).tolist() == [30, 30]
    assert told
    assert all(re.fullmatch(r"\d+ of 60 samples of data.train read again, about \d+ s left", text) for text in told)
    indexed = take_loader(DataLoader(NUMBERS, 2), micro_batch=2, world=make_world(), seed=0)  # type: ignore[arg-type]
    indexed.seek(4)
    assert indexed.describe_replay() is None


def test_loading_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first_batches(DataLoader(NUMBERS, batch_size=2, shuffle=True), 7)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "loader",
    [DataLoader(NUMBERS, batch_size=4), DataLoader(NUMBERS, batch_sampler=BatchSampler(NUMBERS, 4, False))],
    ids=["batch_size", "batch_sampler"],
)
def test_a_batch_size_other_than_the_micro_batch_is_refused(loader: Any) -> None:
    with pytest.raises(DataError, match=r"batch_size 4, but trainer.micro_batch is 2") as caught:
        first_batches(loader, 1)
    assert "set trainer.micro_batch to 4" in caught.value.hint


def test_batches_of_another_size_are_told_where_the_loader_does_not_say() -> None:
    loader = DataLoader(torch.arange(12).reshape(3, 4), batch_size=None)
    with pytest.warns(UserWarning, match="yields batches of 4 samples, but trainer.micro_batch is 2"):
        first_batches(loader, 1)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(NUMBERS, batch_size=16, drop_last=True), "is empty"),
        (Batches(), "yields no batch"),
        (DataLoader(NUMBERS, batch_size=2, sampler=DistributedSampler(NUMBERS, 4, 3)), "rank 3 of 4"),
    ],
)
def test_what_gives_nothing_or_is_anothers_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        first_batches(loader, 1, micro_batch=16 if message == "is empty" else 2, world=make_world(0, 2))


def test_an_iterator_that_ends_is_explained() -> None:
    with pytest.raises(DataError, match="yields no batch on rank 0 when it is started again"):
        first_batches(iter(Batches([1, 2])), 2)


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "batch sampler", "weighted", "no batches"])
def test_ranks_take_turns_in_one_sequence(kind: str) -> None:
    whole = first_batches(LOADERS[kind](), 12)
    for rank in range(3):
        assert first_batches(LOADERS[kind](), 4, world=make_world(rank, 3)) == whole[rank::3]
        assert first_batches(LOADERS[kind](), 2, seek=12, world=make_world(rank, 3)) == whole[6 + rank :: 3]


def test_a_state_of_the_loaders_own_is_kept_and_used() -> None:
    def make() -> tuple[Counting, StatefulLoader]:
        loader = Counting([1, 2], [3, 4], [5, 6])
        taken = take_loader(loader, micro_batch=2, world=make_world(), seed=0)
        assert isinstance(taken, StatefulLoader)
        return loader, taken

    _, first = make()
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state = first.state_dict()
    loader, second = make()
    second.load_state_dict(state)
    second.seek(10)
    assert [batch.tolist() for batch in islice(iter(second), 2)] == [[5, 6], [1, 2]]
    assert loader.read == 2
    _, other = make()
    other.load_state_dict({**state, "world_size": 2})
    other.seek(10)
    assert next(iter(other)).tolist() == [5, 6]


def test_a_state_counts_after_the_first_batch_was_looked_at() -> None:
    """As it is on several ranks, to see whether they read the same."""
    taken = take_loader(Counting([1, 2], [3, 4], [5, 6]), micro_batch=2, world=make_world(), seed=0)
    assert isinstance(taken, StatefulLoader)
    taken._share._peek()
    taken.load_state_dict({"loader": {"given": 1}, "epoch": 0, "number": 1, "world_size": 1})
    assert [batch.tolist() for batch in islice(iter(taken), 3)] == [[3, 4], [5, 6], [1, 2]]


def test_a_program_sees_the_loaders_own_epochs() -> None:
    taken = take_loader(DataLoader(NUMBERS, batch_size=4), micro_batch=4, world=make_world(), seed=0)
    epochs = Epochs(taken, 4)
    assert len(epochs) == 3
    assert [[len(batch) for batch in epochs] for _ in range(2)] == [[4, 4, 2]] * 2
    unsized = Epochs(take_loader(Batches([1, 2], [3, 4]), micro_batch=2, world=make_world(), seed=0), 2)
    assert [batch.tolist() for batch in unsized] == [[1, 2], [3, 4]] == [batch.tolist() for batch in unsized]


@pytest.mark.parametrize("length", [1, 4, 5, 9])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_weighs_every_sample_of_a_loader_once(length: int, world_size: int) -> None:
    passes = []
    for rank in range(world_size):
        loader = DataLoader(list(range(length)), batch_size=2)
        passes.append(list(LoaderEvaluation(loader, world=make_world(rank, world_size), seed=0).limit(None)))
    assert len({len(pairs) for pairs in passes}) == 1
    counted = [sample for pairs in passes for batch, weight in pairs if weight for sample in batch.tolist()]
    assert sorted(counted) == list(range(length))


def test_evaluation_counts_what_has_no_length_and_refuses_what_is_read_once() -> None:
    evaluation = LoaderEvaluation(Batches([1, 2], [3], [4, 5]), world=make_world(), seed=0)
    assert [(len(evaluation.limit(most)), len(list(evaluation.limit(most)))) for most in (2, None, 1)] == [
        (2, 2),
        (3, 3),
        (1, 1),
    ]
    with pytest.raises(DataError, match="can be read only once"):
        LoaderEvaluation(iter([1]), world=make_world(), seed=0)


# ---- several ranks


def read_on_rank(world: World, kind: str) -> Any:
    torch.manual_seed(world.data_rank)
    own = [[10 * world.data_rank, i] for i in range(2 + world.data_rank)]
    makers = {
        "same stream": lambda: DataLoader(Stream(12), batch_size=2),
        "unknown": lambda: Batches([0, 1], [2, 3], [4, 5]),
        "own": lambda: Batches(*own),
        "distributed": lambda: DataLoader(NUMBERS, 2, sampler=DistributedSampler(NUMBERS, shuffle=False)),
        "differs": lambda: DataLoader(NUMBERS, 2, sampler=torch.randperm(10).tolist()),
    }
    try:
        taken = take_loader(makers[kind](), micro_batch=2, world=world, seed=0)
        batches = [batch.tolist() for batch in islice(iter(taken), 3)]
        pairs = list(LoaderEvaluation(makers[kind](), world=world, seed=0).limit(None))
        evaluated = [(batch.tolist(), weight) for batch, weight in pairs]
        if taken.samples_per_epoch is None:
            taken.passes.require_same(world)
        return batches, evaluated
    except DataError as error:
        return str(error)


def test_several_ranks_share_a_loader_that_is_the_same_on_all() -> None:
    for kind, expected in {
        "same stream": [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]],
        "unknown": [[[0, 1], [4, 5], [2, 3]], [[2, 3], [0, 1], [4, 5]]],
        "distributed": [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]],
    }.items():
        ranks = run_ranks(read_on_rank, 2, kind)
        assert [batches for batches, _ in ranks] == expected, kind
        weighed = [sample for _, pairs in ranks for batch, weight in pairs if weight for sample in batch]
        assert sorted(weighed) == list(range({"same stream": 12, "unknown": 6, "distributed": 10}[kind])), kind
        assert len({len(pairs) for _, pairs in ranks}) == 1


def test_a_loader_of_other_batches_on_each_rank_is_left_alone_until_it_ends_elsewhere() -> None:
    told = run_ranks(read_on_rank, 2, "own")
    assert told[0] == told[1]
    assert "data.train: pass 1 ended after 2 batches on rank 0, but on rank 1 it has not ended yet" in told[0]


def test_an_order_that_differs_by_rank_is_refused() -> None:
    for told in run_ranks(read_on_rank, 2, "differs"):
        assert "orders the samples differently on each rank" in told


def end_elsewhere(world: World) -> list[str]:
    found = []
    for ends in ([4, 8], [4, 8 + world.data_rank]):
        passes = Passes("data.train")
        for batch in ends:
            passes.end(batch)
        try:
            passes.require_same(world)
            found.append("")
        except DataError as error:
            found.append(error.message)
    return found


def test_passes_that_end_elsewhere_are_an_error_on_every_rank() -> None:
    for same, other in run_ranks(end_elsewhere, 2):
        assert (same, "pass 2 ended after 8 batches on rank 0, but on rank 1 after 9" in other) == ("", True)


def evaluate_uneven(world: World) -> list[str]:
    sizes, told = (8, 8 + 4 * world.data_rank), []
    for size in sizes:
        try:
            loader = LoaderEvaluation(DataLoader(Stream(size), batch_size=2), world=world, seed=0)
            told.append(str(sum(samples for _, samples in loader.limit(None))))
        except DataError as error:
            told.append(str(error))
        try:
            options: dict[str, Any] = {"micro_batch": 2, "world": world, "collate": None, "max_batches": None}
            told.append(str(sum(samples for _, samples in EvaluationBatches(Stream(size), **options))))
        except DataError as error:
            told.append(str(error))
    try:
        LoaderEvaluation(DataLoader(NUMBERS[: 8 + 2 * world.data_rank], batch_size=2), world=world, seed=0)
    except DataError as error:
        told.append(str(error))
    return told


def test_streams_of_different_length_are_not_evaluated() -> None:
    # At stage 3, ranks would wait for each other, or gather different layers.
    for even, stream, uneven, longer, known in run_ranks(evaluate_uneven, 2):
        assert (even, stream) == ("4", "4")
        assert "data.eval differs between ranks: the numbers of its batches are 4, 6" in uneven
        assert "data.eval differs between ranks: the numbers of its batches are 4, 5" in known
        assert "data.eval differs between ranks: 8 samples on rank 0, 12 samples on rank 1" in longer
