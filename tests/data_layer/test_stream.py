"""Batches of iterable datasets: each rank reads its part, and resumed runs continue on any number of ranks."""

from __future__ import annotations

import json
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from ranks import run_ranks
from small_jobs import make_document
from torch.utils.data import IterableDataset, get_worker_info

from dsjob.data import StreamLoader, load_training
from dsjob.data.lanes import Position, Share, count_lanes, divide_lanes
from dsjob.errors import DataError
from dsjob.ranks.mesh import World

CPU = torch.device("cpu")


class Plain(IterableDataset[int]):
    """The numbers of range(length); `read` are those that were read in this process."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.read = numbers, list[int]()

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers:
            self.read.append(number)
            yield number


class Stateful(Plain):
    """Continues where another stopped."""

    begun = position = 0

    def __iter__(self) -> Iterator[int]:
        self.position, self.begun = self.begun, 0
        for number in self.numbers[self.position :]:
            self.position += 1
            self.read.append(number)
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = state["position"]


class Sharded(Stateful):
    """Has shards; `parts` are those that were opened."""

    def __init__(self, numbers: range, num_shards: int) -> None:
        super().__init__(numbers)
        self.num_shards, self.parts = num_shards, list[Stateful]()

    def shard(self, num_shards: int, index: int) -> Stateful:
        self.parts.append(Stateful(self.numbers[index::num_shards]))
        return self.parts[-1]


class OfWorkers(Plain):
    """Divides its samples among the workers of a DataLoader, as torch's documentation recommends."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(self.numbers[worker.id :: worker.num_workers] if worker else self.numbers)


def make(dataset: Any, rank: int = 0, world_size: int = 1, *, micro_batch: int = 2, workers: int = 0) -> StreamLoader:
    world = World(data_rank=rank, local_rank=rank, data_size=world_size, device=CPU)
    loader = load_training(dataset, micro_batch=micro_batch, world=world, seed=3, num_workers=workers)
    assert isinstance(loader, StreamLoader)
    return loader


def take(loader: StreamLoader, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(loader, count)]


def flatten(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize(
    ("lanes", "world_size", "expected"),
    [
        (4, 2, [[Share(0, 0, 1), Share(2, 0, 1)], [Share(1, 0, 1), Share(3, 0, 1)]]),
        (3, 2, [[Share(0, 0, 1), Share(2, 0, 1)], [Share(1, 0, 1)]]),
        (1, 2, [[Share(0, 0, 2)], [Share(0, 1, 2)]]),
        (2, 3, [[Share(0, 0, 2)], [Share(1, 0, 1)], [Share(0, 1, 2)]]),
    ],
)
def test_every_lane_has_its_ranks(lanes: int, world_size: int, expected: list[list[Share]]) -> None:
    assert [divide_lanes(lanes, rank, world_size) for rank in range(world_size)] == expected


@pytest.mark.parametrize(
    ("shards", "world_size", "workers", "expected"),
    [(8, 2, 0, 2), (8, 2, 2, 4), (3, 2, 2, 2), (3, 4, 0, 2), (1, 4, 0, 1), (1024, 1024, 0, 1024)],
)
def test_ranks_share_lanes_equally(shards: int, world_size: int, workers: int, expected: int) -> None:
    assert count_lanes(Sharded(range(10), shards), world_size, workers) == expected
    assert count_lanes(Plain(range(10)), world_size, workers) == 1


def test_a_rank_of_many_reads_only_its_part() -> None:
    dataset = Sharded(range(1024 * 100), 2048)
    batches = take(make(dataset, 7, 1024, micro_batch=8), 20)
    used, read = len(flatten(batches)), sum(len(part.read) for part in dataset.parts)
    assert used == 160
    assert read <= 1.1 * used
    assert set(flatten(batches)) <= set(range(7, 1024 * 100, 1024))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("shards", [1, 2, 4, 6])
def test_ranks_together_read_each_sample_once_per_pass(shards: int, workers: int) -> None:
    numbers = range(48)  # full rounds on any of these
    found = [flatten(take(make(Sharded(numbers, shards), rank, 2, workers=workers), 24)) for rank in range(2)]
    assert Counter(found[0] + found[1]) == Counter(dict.fromkeys(numbers, 2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Plain(range(22)), Stateful(range(22)), Sharded(range(22), 4)], ids=type)
@pytest.mark.parametrize("seen", [1, 2, 5, 6, 11])
@pytest.mark.full(
    "2-Plain-2",
    "2-Stateful-2",
    "2-Sharded-2",
    "6-Plain-2",
    "6-Stateful-2",
    "6-Sharded-2",
    "11-Plain-2",
    "11-Stateful-2",
    "11-Sharded-2",
)
def test_a_resumed_run_continues(dataset: Any, workers: int, seen: int) -> None:
    whole = take(make(dataset, workers=workers), 16)
    first = make(dataset, workers=workers)
    batches = iter(first)
    begun = [next(batches).tolist() for _ in range(seen)]
    state = first.state_dict()
    del batches
    again = make(dataset, workers=workers)
    again.seek(2 * seen)
    again.load_state_dicts([state])
    assert begun + take(again, 16 - seen) == whole


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize(("shards", "workers"), [(1, 0), (4, 0), (4, 2)])
@pytest.mark.full("4-2-1-1", "4-2-1-4", "4-2-2-2", "4-2-2-4", "4-2-4-1", "4-2-4-2", "4-2-4-4")
def test_another_number_of_ranks_reads_what_is_left(before: int, after: int, shards: int, workers: int) -> None:
    numbers = range(64)
    seen, states = list[int](), list[dict[str, Any]]()
    for rank in range(before):
        loader = make(Sharded(numbers, shards), rank, before)
        seen += flatten(take(loader, 8 // before))
        states.append(loader.state_dict())
    assert len(set(seen)) == 16
    for rank in range(after):
        loader = make(Sharded(numbers, shards), rank, after, workers=workers)
        loader.load_state_dicts(states)
        seen += flatten(take(loader, 24 // after))
    assert sorted(seen) == list(numbers)


@pytest.mark.parametrize("shards", [1, 4])
def test_a_run_that_is_resumed_twice_rewinds_no_lane(shards: int) -> None:
    numbers, seen, states = range(64), list[int](), list[dict[str, Any]]()
    for part in (2, 3, 3):
        after = list[dict[str, Any]]()
        for rank in range(2):
            loader = make(Sharded(numbers, shards), rank, 2, workers=0)
            if states:
                loader.load_state_dicts(states)
            seen += flatten(take(loader, 2 * part))
            after.append(loader.state_dict())
        states = after
    assert sorted(seen) == list(numbers)


def test_a_dataset_with_state_reads_nothing_again() -> None:
    told = "reading 40 samples of data.train (Plain) again, because it has no state_dict and load_state_dict"
    for kind, read, replay in ((Stateful, [40, 41], None), (Plain, list(range(42)), told)):
        first = make(kind(range(100)))
        take(first, 20)
        again = make(kind(range(100)))
        again.load_state_dict(first.state_dict())
        assert again.describe_replay() == replay
        assert take(again, 1) == [[40, 41]]
        assert again.dataset.read == read


@pytest.mark.parametrize(("extra", "why"), [(torch.zeros(2), "it contains a tensor"), ("x" * 2**20, "the limit is")])
def test_a_state_that_no_checkpoint_can_hold_is_replayed_in_the_same_order(extra: Any, why: str) -> None:
    class Heavy(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "extra": [extra]}

    class Shards(Sharded):
        def shard(self, num_shards: int, index: int) -> Stateful:
            return Heavy(self.numbers[index::num_shards])

    def load() -> StreamLoader:
        loader = make(Shards(range(80), 4), 0, 1)
        loader.load_state_dict({"lanes": 4, "turn": 0, "read": []})  # a run that began on four ranks
        return loader

    first, again = load(), load()
    expected, seen = take(load(), 12), take(first, 5)
    with pytest.warns(UserWarning, match=why):
        state = first.state_dict()
    again.load_state_dict(json.loads(json.dumps(state)))
    told = again.describe_replay()
    assert told
    assert told.startswith("reading 10 samples of data.train (Shards) again, because the checkpoint does not contain")
    assert seen + take(again, 7) == expected


class Slow(Plain):
    """A stream without state."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            time.sleep(0.002)
            yield number


class SlowShards(Sharded):
    def shard(self, num_shards: int, index: int) -> Stateful:
        return Slow(self.numbers[index::num_shards])  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "workers"), [("plain", 0), ("plain", 2), ("shards", 2), ("old", 0), ("old", 2)])
@pytest.mark.full("plain-2", "old-0", "shards-2")
def test_a_replay_tells_how_far_it_is(kind: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """old: a checkpoint of a version that stored no position."""
    monkeypatch.setattr("dsjob.data.replay.EVERY", 0.05)
    told = list[str]()
    dataset = SlowShards(range(1200), 2) if kind == "shards" else Slow(range(1200))
    loader = make(dataset, workers=workers)
    if kind == "old":
        loader.seek(400)
    else:
        lanes = 2 if kind == "shards" else 1
        read = [(lane, asdict(Position(samples=400 // lanes))) for lane in range(lanes)]
        loader.load_state_dict({"lanes": lanes, "turn": 0, "read": read})
    loader.say = told.append
    expected = [[400, 402], [401, 403]] if kind == "shards" else [[400, 401], [402, 403]]
    assert take(loader, 2) == expected
    assert len(told) >= 3
    found = [re.fullmatch(r"(\d+) of 400 samples of data.train read again, about \d+ s left", text) for text in told]
    counts = [int(match.group(1)) for match in found if match]
    assert len(counts) == len(told)
    assert counts == sorted(set(counts))
    for thread in threading.enumerate():
        if thread.name == "replay":
            thread.join(10)
            assert not thread.is_alive()


def test_the_next_lane_is_found_under_a_model_parallel_unit() -> None:
    """There, a checkpoint has a state for each rank: two for each data-parallel one."""
    loaders = [make(Sharded(range(64), 4), rank, 2, workers=0) for rank in (0, 1)]
    for loader in loaders:  # a run that began on four ranks reads two lanes on each of two
        loader.load_state_dicts([{"lanes": 4, "turn": 0, "read": []}] * 2)
    for _ in range(3):
        take(loaders[1], 1)
    states = [each.state_dict() for each in (loaders[0], loaders[0], loaders[1], loaders[1])]
    again = make(Sharded(range(64), 4), 1, 2, workers=0)
    again.load_state_dicts(states)
    assert take(again, 1) == take(loaders[1], 1)


def test_a_checkpoint_without_a_position_is_continued_in_one_part() -> None:
    """Checkpoints of earlier versions hold none: the number of samples decides, as it did there."""
    ranks = []
    for rank in range(2):
        loader = make(Sharded(range(40), 8), rank, 2)
        loader.seek(12)
        ranks.append(take(loader, 2))
        assert loader.state_dict()["lanes"] == 1
    assert ranks == [[[12, 14], [16, 18]], [[13, 15], [17, 19]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_divides_among_workers_loses_nothing(workers: int) -> None:
    assert sorted(flatten(take(make(OfWorkers(range(24)), workers=workers), 12))) == list(range(24))


def test_passes_have_their_number() -> None:
    class Counted(Plain):
        def set_epoch(self, epoch: int) -> None:
            self.numbers = range(10 * epoch, 10 * epoch + 4)

    assert take(make(Counted(range(0))), 6) == [[0, 1], [2, 3], [10, 11], [12, 13], [20, 21], [22, 23]]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_part_without_a_full_batch_is_an_error(shards: int) -> None:
    loader = make(Sharded(range(2 * shards), shards), 0, shards, micro_batch=4)
    part = " from part 0 of 2" if shards > 1 else ""
    with pytest.raises(DataError, match=rf"data.train \(Sharded\) yields no full batch{part}: 4 samples are needed"):
        take(loader, 1)


def test_a_dataset_with_fewer_shards_than_the_checkpoint_is_refused() -> None:
    loader = make(Sharded(range(40), 4), 0, 4)
    take(loader, 1)
    with pytest.raises(ValueError, match=r"has read data\.train in 4 parts, but it has 2 shards"):
        make(Sharded(range(40), 2)).load_state_dict(loader.state_dict())


def run_and_list(world: World | None, folder: str, steps: int) -> list[int]:
    """Runs a job over a stream up to this step. The samples that this rank has read in it."""
    small_jobs.READ.clear()
    train = {"_target_": "small_jobs.Parts", "num_shards": 4}
    small_jobs.run(make_document(folder, data={"train": train}, trainer={"max_steps": steps}), world)
    return list(small_jobs.READ)


def test_a_job_continues_a_stream_on_other_numbers_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    seen = [
        *run_ranks(run_and_list, 2, folder, 2),
        run_and_list(None, folder, 4),
        *run_ranks(run_and_list, 2, folder, 5),
    ]
    assert list(map(len, seen)) == [8, 8, 16, 4, 4]
    assert sorted(sample for read in seen for sample in read) == list(range(40))
    assert "resumes with rank 0's state" not in " ".join(capsys.readouterr().out.split())


def test_a_resumed_job_shows_how_far_its_replay_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = small_jobs.Data.__getitem__

    def read_slowly(data: small_jobs.Data, index: int) -> Any:
        time.sleep(0.01)
        return read(data, index)

    monkeypatch.setattr(small_jobs.Data, "__getitem__", read_slowly)
    monkeypatch.delattr(small_jobs.Parts, "state_dict")
    monkeypatch.setattr("dsjob.data.replay.EVERY", 0.05)
    run_and_list(None, str(tmp_path), 4)
    assert "read again" not in capsys.readouterr().out
    run_and_list(None, str(tmp_path), 5)
    assert re.search(
        r"^replay  \d+ of 32 samples of data.train read again, about 0 s left$", capsys.readouterr().out, re.M
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_hugging_face_are_read_in_shards_and_resumed(workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    mapped = datasets.Dataset.from_dict({"x": list(range(64))})

    def build(rank: int) -> StreamLoader:
        return make(mapped.to_iterable_dataset(num_shards=4), rank, 2, workers=workers)

    def read(loader: StreamLoader, count: int) -> list[list[int]]:
        return [batch["x"].tolist() for batch in islice(loader, count)]

    whole = [read(build(rank), 16) for rank in range(2)]
    assert sorted(flatten(whole[0] + whole[1])) == list(range(64))
    for rank in range(2):
        first = build(rank)
        begun = read(first, 5)
        again = build(rank)
        again.load_state_dict(first.state_dict())
        assert again.describe_replay() is None
        assert begun + read(again, 11) == whole[rank]


def test_a_shuffle_buffer_of_hugging_face_is_told() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(64))}).to_iterable_dataset(num_shards=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(stream)
    with pytest.warns(
        UserWarning, match=r"data\.train \(IterableDataset\): checkpoints do not contain its shuffle buffer"
    ):
        make(stream.shuffle(seed=1, buffer_size=8).map(lambda row: row))
