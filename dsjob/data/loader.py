"""Loaders: endless training batches that know their place, evaluation batches that end together on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dsjob.data.batches import count_samples
from dsjob.data.order import RankBatches, SampleOrder
from dsjob.errors import DataError
from dsjob.mesh import World
from dsjob.seeding import seed_rng

Collate = Callable[[list[Any]], Any]


class TrainingLoader:
    """This rank's micro batches, without end; `seek` goes to the place of a resumed run.

    A map-style dataset is read in a `SampleOrder`. An iterable one is read in its own order, the ranks taking turns,
    and started again when it ends; seeking in it reads past what was seen.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch: int,
        world: World,
        seed: int,
        shuffle: bool = True,
        collate: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        name: str = "data.train",
    ) -> None:
        self.dataset = dataset
        self._micro_batch, self._world, self._seed, self._shuffle = micro_batch, world, seed, shuffle
        self._options: dict[str, Any] = {
            "collate_fn": collate or default_collate,
            "num_workers": num_workers,
            "pin_memory": pin_memory and world.device.type == "cuda",
            # By default a DataLoader draws from the global generator when it starts: a resumed run would draw twice.
            "generator": torch.Generator().manual_seed(seed + world.rank),
        }
        self._name = name
        self._start = 0
        self.samples_per_epoch = count_dataset(dataset, name)

    def seek(self, samples: int) -> None:
        """Makes iteration begin after the first `samples` samples of the run (over all ranks)."""
        self._start = samples

    def __iter__(self) -> Iterator[Any]:
        if self.samples_per_epoch is None:
            yield from self.iterate_stream()
            return
        order = SampleOrder(self.samples_per_epoch, self._seed, self._shuffle)
        batches = RankBatches(
            order,
            start=self._start,
            micro_batch=self._micro_batch,
            rank=self._world.rank,
            world_size=self._world.world_size,
        )
        if self._options["num_workers"]:
            stride = self._micro_batch * self._world.world_size
            numbered = _Numbered(batches, self._start + self._world.rank * self._micro_batch, stride)
            yield from DataLoader(_Seeded(self.dataset, self._seed), batch_sampler=numbered, **self._options)
        else:
            yield from DataLoader(self.dataset, batch_sampler=batches, **self._options)

    def iterate_stream(self, *, once: bool = False) -> Iterator[Any]:
        """The batches of an iterable dataset; without end, unless `once`."""
        rank, world_size = self._world.rank, self._world.world_size
        skipped = self._start // (self._micro_batch * world_size)
        loader = DataLoader(
            _Turns(self.dataset, rank, world_size), batch_size=self._micro_batch, drop_last=True, **self._options
        )
        while True:
            seen = 0
            for seen, batch in enumerate(loader, start=1):  # noqa: B007
                if skipped:
                    skipped -= 1
                    continue
                yield batch
            if not seen:
                raise DataError(f"{self._name} ({type(self.dataset).__name__}) yields no full batch for rank {rank}")
            if once:
                return


class NoLoader:
    """In the place of a TrainingLoader on a rank that reads no data: batches are None."""

    def __init__(self, samples_per_epoch: int | None) -> None:
        self.samples_per_epoch = samples_per_epoch

    def seek(self, samples: int) -> None:
        """There is no place to go to."""

    def __iter__(self) -> Iterator[None]:
        return repeat(None)


class _Numbered:
    """Batches of indices, each index with the sample's number in the run: `first`, and `stride` more a batch."""

    def __init__(self, batches: Iterable[list[int]], first: int, stride: int) -> None:
        self._batches, self._first, self._stride = batches, first, stride

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch, first in zip(self._batches, count(self._first, self._stride)):
            yield [(index, first + place) for place, index in enumerate(batch)]


class _Seeded(Dataset[Any]):
    """A dataset in a worker process, whose random transforms depend on the seed and the sample's number alone.

    A worker's own generators would tell where the run was resumed, and how many workers and ranks there are.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, numbered: tuple[int, int]) -> Any:
        index, number = numbered
        seed_rng((self._seed * 1_000_003 + number) % 2**63)
        return self._dataset[index]


class Epochs:
    """A training loader as a program drives it: each iteration is an epoch, and `len` its number of micro batches."""

    def __init__(self, loader: TrainingLoader, samples_per_pass: int) -> None:
        self._loader, self._samples_per_pass = loader, samples_per_pass
        self.dataset = loader.dataset
        self.epoch = 0

    def __len__(self) -> int:
        if self._loader.samples_per_epoch is None:
            raise TypeError("an iterable dataset has no length")
        return max(1, self._loader.samples_per_epoch // self._samples_per_pass)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self._loader.samples_per_epoch is None:
            yield from self._loader.iterate_stream(once=True)
        else:
            self._loader.seek(epoch * len(self) * self._samples_per_pass)
            yield from islice(self._loader, len(self))


class RepeatingLoader:
    """Any loader, begun again whenever it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise DataError("the loader to be repeated yields nothing") from None


class _Turns(IterableDataset[Any]):
    """An iterable dataset of which a rank takes every world_size-th sample, and a worker its share of those."""

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        self._dataset, self._rank, self._world_size = dataset, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        return islice(iter(self._dataset), self._rank * workers + number, None, self._world_size * workers)


def count_dataset(dataset: Any, name: str) -> int | None:
    """The number of samples of a map-style dataset; None for an iterable one. Raises DataError where it has none."""
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset):
        if not hasattr(dataset, "__iter__"):
            raise DataError(
                f"{name} is {type(dataset).__name__}, which is no dataset",
                hint="a dataset has __len__ and __getitem__, or __iter__",
            )
        return None
    try:
        length = len(dataset)
    except TypeError:
        raise DataError(f"{name} ({type(dataset).__name__}) has __getitem__ but no __len__") from None
    if length == 0:
        raise DataError(f"{name} ({type(dataset).__name__}) is empty", hint="check its path, split and limits")
    return length


class EvaluationBatches:
    """This rank's evaluation batches, each with its weight: the number of samples in it. `len`: how many.

    All ranks get equally many batches, since a sharded model runs on all of them at once: a rank that has none left
    gets its first one again with weight 0. `max_batches`: at most so many a rank, spread evenly over the dataset.
    """

    def __init__(
        self, dataset: Any, *, micro_batch: int, world: World, collate: Collate | None, max_batches: int | None
    ) -> None:
        self._collate, self._micro_batch, self._world = collate or default_collate, micro_batch, world
        length = count_dataset(dataset, "data.eval")
        self._samples: Sequence[Any] = dataset
        if length is None:
            most = (max_batches or 2**31) * micro_batch * world.world_size
            self._samples = list(islice(iter(dataset), most))
            length = len(self._samples)
            if not length:
                raise DataError(f"data.eval ({type(dataset).__name__}) yields nothing")
        self._length, self._total = length, math.ceil(length / micro_batch)
        limited = max_batches is not None and max_batches < math.ceil(self._total / world.world_size)
        self._taken = max_batches * world.world_size if limited and max_batches else self._total

    def __len__(self) -> int:
        return math.ceil(self._taken / self._world.world_size)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for number in range(len(self)):
            index = number * self._world.world_size + self._world.rank
            first = (index * self._total // self._taken) * self._micro_batch if index < self._taken else 0
            batch = self._collate(
                [self._samples[i] for i in range(first, min(first + self._micro_batch, self._length))]
            )
            yield batch, count_samples(batch) if index < self._taken else 0
