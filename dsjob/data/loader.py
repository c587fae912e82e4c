"""Loaders over datasets: endless, resumable training batches, and evaluation batches that end together on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from dsjob.contract.spec import Data
from dsjob.data.batches import count_samples
from dsjob.data.order import GroupedOrder, RankBatches, SampleOrder
from dsjob.data.passes import Passes, require_same_length
from dsjob.data.samples import (
    Batches,
    ByEpoch,
    Collate,
    FailedBatch,
    Samples,
    keep,
    number_stream,
    raise_failures,
)
from dsjob.data.workers import choose_options, outlive_stop
from dsjob.errors import DataError
from dsjob.ranks.mesh import World

_WORKERS = 2  # one prepares the next batch while the batch of the other is waiting


class TrainingLoader:
    """This rank's micro batches of a map-style dataset with `length` samples, endlessly, in the order of a
    `SampleOrder`. `seek` moves to the position of a resumed run.

    grouped: the samples of a batch over all ranks, if samples of similar length are to be together. Raises DataError
    if the dataset does not tell lengths.
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        micro_batch: int,
        world: World,
        seed: int,
        shuffle: bool = True,
        grouped: int | None = None,
        collate: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        name: str = "data.train",
    ) -> None:
        self.dataset = dataset
        self._micro_batch, self._world = micro_batch, world
        by_epoch = hasattr(dataset, "read_in_epoch") and grouped is None
        self._samples = Samples(ByEpoch(dataset, length) if by_epoch else dataset, collate, name, seed)
        self._options = choose_options(world, seed, num_workers=num_workers, pin_memory=pin_memory)
        self._name = name
        self._start = 0
        self._order = SampleOrder(length, seed, shuffle, by_epoch=by_epoch)
        if grouped is not None:
            lengths = read_lengths(dataset, length, name)
            self._order = GroupedOrder(length, seed, shuffle, lengths=lengths, train_batch=grouped)
        self.samples_per_epoch: int | None = length
        self.passes = Passes(name)

    def peek(self) -> Any:
        """A batch of the dataset's first samples, without moving. May draw random numbers. Raises DataError."""
        return self._samples.make_batch(range(min(self._micro_batch, self.samples_per_epoch or 0)))

    def seek(self, samples: int) -> None:
        """Makes iteration begin after the first `samples` samples of the run (over all ranks)."""
        self._start = samples

    def __iter__(self) -> Iterator[Any]:
        chosen: Iterable[list[Any]]
        chosen = batches = RankBatches(
            self._order,
            start=self._start,
            micro_batch=self._micro_batch,
            rank=self._world.data_rank,
            world_size=self._world.data_size,
        )
        if self._options["num_workers"]:
            # The samples between two batches of this rank belong to the other ranks.
            stride = self._micro_batch * self._world.data_size
            chosen = _Numbered(batches, self._start + self._world.data_rank * self._micro_batch, stride)
        # Without workers, transforms draw from the rank's own generators, which checkpoints save. So no number is
        # needed.
        made = Batches(self._samples, numbered=self._options["num_workers"] > 0)
        yield from raise_failures(DataLoader(made, batch_sampler=chosen, collate_fn=keep, **self._options), self._name)

    def iterate_epoch(self, number: int, batches: int | None) -> Iterator[Any]:
        """This rank's batches of epoch `number`, and how many."""
        assert batches is not None  # a map-style dataset has a length
        self.seek(number * batches * self._micro_batch * self._world.data_size)
        return islice(self, batches)


class NoLoader:
    """Replaces a TrainingLoader on a rank that reads no data. Its batches are None."""

    def __init__(self, samples_per_epoch: int | None = None) -> None:
        self.samples_per_epoch = samples_per_epoch
        self.passes = Passes("data.train")

    def seek(self, samples: int) -> None:
        """Does nothing: there is no position."""

    def __iter__(self) -> Iterator[None]:
        return repeat(None)


class _Numbered:
    """Adds to each index its sample's number in the run. Each batch's first number is `stride` more than the last's."""

    def __init__(self, batches: Iterable[list[int]], first: int, stride: int) -> None:
        self._batches, self._first, self._stride = batches, first, stride

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch, first in zip(self._batches, count(self._first, self._stride)):
            yield [(index, first + place) for place, index in enumerate(batch)]


def read_lengths(dataset: Any, length: int, name: str) -> Any:
    """The lengths of a dataset's samples, for `data.group_by_length`. Raises DataError."""
    kind, lengths = type(dataset).__name__, getattr(dataset, "lengths", None)
    if lengths is None:
        raise DataError(
            f"data.group_by_length needs the lengths of the samples, and {name} ({kind}) does not tell them",
            hint="give the dataset an attribute `lengths`: a sequence with one number per sample",
        )
    if len(lengths) != length:
        raise DataError(f"{name} ({kind}) has {length:,} samples, but {len(lengths):,} lengths")
    return lengths


def count_dataset(dataset: Any, name: str) -> int | None:
    """The number of samples of a map-style dataset; None for an iterable one. Raises DataError if it is empty."""
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset):
        if not hasattr(dataset, "__iter__"):
            raise DataError(
                f"{name} is of type {type(dataset).__name__}, which is not a dataset",
                hint="a dataset has __len__ and __getitem__, or __iter__",
            )
        return None
    try:
        length = len(dataset)
    except TypeError:
        raise DataError(
            f"{name} ({type(dataset).__name__}) has __getitem__ but no __len__",
            hint="define __len__: it returns the number of samples",
        ) from None
    if length == 0:
        raise DataError(f"{name} ({type(dataset).__name__}) is empty", hint="check its path, split and limits")
    return length


def _take(stream: Any, most: int, name: str) -> list[Any]:
    taken = []
    for item in islice(number_stream(stream, name), most):
        if isinstance(item, FailedBatch):
            raise item.error
        taken.append(item[1])
    return taken


def choose_loading(spec: Data, dataset: Any, world: World) -> dict[str, Any]:
    """The DataLoader options `num_workers` and `pin_memory` for a dataset on this rank."""
    on_gpu, workers = world.device.type == "cuda", spec.num_workers
    if workers is None:
        by_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
        workers = _WORKERS if on_gpu and by_index else 0
    return {"num_workers": workers, "pin_memory": spec.pin_memory and on_gpu}


class _Chosen:
    """The sample indices of each batch: `choose` of each of `batches`."""

    def __init__(self, batches: Iterable[int], choose: Callable[[int], list[int]]) -> None:
        self._batches, self._choose = batches, choose

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._choose, self._batches)


class EvaluationBatches:
    """Yields this rank's evaluation batches, each with its weight: the number of its samples. `len`: of batches.

    All ranks get equally many batches, because a sharded model runs on all ranks at once. A rank with none left gets
    the first batch again, with weight 0. max_batches: the most per rank; spread evenly over the dataset if `spread`,
    otherwise its first ones. name: the dataset's key in the document, for messages.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch: int,
        world: World,
        collate: Collate | None,
        max_batches: int | None,
        spread: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        name: str = "data.eval",
    ) -> None:
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "worker_init_fn": outlive_stop,
            "pin_memory": pin_memory,
        }
        self._micro_batch, self._world = micro_batch, world
        length = count_dataset(dataset, name)
        if length is None:
            most = (max_batches or 2**31) * micro_batch * world.data_size
            kind, dataset = type(dataset).__name__, _take(dataset, most, name)
            length = len(dataset)
            if world.model.size == 1:  # otherwise ranks of one model are compared, of which some may read nothing
                require_same_length(length, world, name)
            if not length:
                raise DataError(f"{name} ({kind}) yields no samples")
        self._samples = Samples(dataset, collate, name)
        self._length, self._total = length, math.ceil(length / micro_batch)
        limited = max_batches is not None and max_batches < math.ceil(self._total / world.data_size)
        # Counted over all ranks. A limit gives every rank equally many.
        self._taken = max_batches * world.data_size if limited and max_batches else self._total
        self._spread = spread

    def __len__(self) -> int:
        return math.ceil(self._taken / self._world.data_size)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        # Batch n belongs to rank n % ranks. Beyond the last batch, `_choose` returns the first one.
        indices = range(self._world.data_rank, len(self) * self._world.data_size, self._world.data_size)
        # A starting DataLoader draws a random number. Without a generator of its own, it would change the numbers that
        # training draws.
        generator = torch.Generator().manual_seed(self._world.data_rank)
        # Chosen as they are read: a list of all indices would take 8 bytes for each sample.
        chosen = _Chosen(indices, self._choose)
        made = Batches(self._samples, numbered=False)
        loader = DataLoader(made, batch_sampler=chosen, collate_fn=keep, generator=generator, **self._options)
        for index, batch in zip(indices, raise_failures(loader, self._samples.name), strict=True):
            yield batch, count_samples(batch) if index < self._taken else 0

    def _choose(self, index: int) -> list[int]:
        """The sample indices of batch `index`, counted over all ranks; those of batch 0 beyond the end."""
        number = index * self._total // self._taken if self._spread else index
        first = number * self._micro_batch if index < self._taken else 0
        return list(range(first, min(first + self._micro_batch, self._length)))
