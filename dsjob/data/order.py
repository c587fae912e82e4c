"""The order of training samples. It depends only on the seed and the number of samples already seen; with
`data.group_by_length`, also on the size of a batch.

Epochs follow each other without a gap, each shuffled differently, so every batch is full. A step takes the next
`train_batch` samples on any number of ranks, so a run that is resumed on another number of ranks sees the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from dsjob.data.permutation import Permutation

Indices = npt.NDArray[np.int64]


def mix_seed(seed: int, number: int) -> int:
    """Derives the seed of an epoch or sample from the run's seed and its number. Multiplying by a large prime keeps
    neighbouring seeds from sharing epochs: seed 1, epoch 2 is not seed 2, epoch 1."""
    return (seed * 1_000_003 + number) % 2**63


# Epochs up to this length are drawn by torch.randperm, which can result in any permutation, and kept in memory (8 MB).
_MOST_DRAWN = 1 << 20
_GROUPED = 50  # batches whose samples are sorted by length together, as in transformers' LengthGroupedSampler


class _Places:
    """The order without shuffling: the index at each place is the place."""

    def __getitem__(self, places: Indices) -> Indices:
        return places


_Order = _Places | Indices | Permutation  # gives the sample index at each place of an epoch


class SampleOrder:
    """The endless sequence of sample indices of a dataset with `length` samples.

    Its memory and the time to start anywhere do not grow with the dataset. by_epoch: epoch e has the indices from e *
    length on; see `ByEpoch`.
    """

    def __init__(self, length: int, seed: int, shuffle: bool, *, by_epoch: bool = False) -> None:
        self.length, self._seed, self._shuffle, self._by_epoch = length, seed, shuffle, by_epoch
        self._latest: tuple[int, _Order] = (-1, _Places())  # the epoch used last, and its order

    def take(self, start: int, size: int) -> list[int]:
        """The indices of `size` samples of the run, from sample number `start` on."""
        indices: list[int] = []
        while len(indices) < size:
            # The epoch, and the place in it.
            number, place = divmod(start + len(indices), self.length)
            end = min(place + size - len(indices), self.length)
            found = self._order(number)[np.arange(place, end)]
            indices += (found + number * self.length if self._by_epoch else found).tolist()
        return indices

    def _order(self, number: int) -> _Order:
        if self._latest[0] != number:
            self._latest = number, self._draw(mix_seed(self._seed, number))
        return self._latest[1]

    def _draw(self, seed: int) -> _Order:
        if not self._shuffle:
            return _Places()
        if self.length > _MOST_DRAWN:
            return Permutation(self.length, seed)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(seed)).numpy()


class GroupedOrder(SampleOrder):
    """The order with samples of similar length together.

    Of each 50 batches, the samples are sorted by length and cut into batches, and the batches are shuffled. The first
    batch of the run has the longest samples, so that a job that does not fit fails in its first step. A run that goes
    on with another batch size forms other groups: it sees some samples of the current group twice, and
    misses others.
    """

    def __init__(self, length: int, seed: int, shuffle: bool, *, lengths: npt.ArrayLike, train_batch: int) -> None:
        super().__init__(length, seed, shuffle)
        # [length]: one number per sample.
        self._lengths, self._train_batch = np.asarray(lengths), train_batch
        self._size = _GROUPED * train_batch
        self._group: tuple[int, list[int]] = (-1, [])  # the number of the group used last, and its indices

    def take(self, start: int, size: int) -> list[int]:
        """The indices of `size` samples of the run, from sample number `start` on."""
        indices: list[int] = []
        while len(indices) < size:
            number, place = divmod(start + len(indices), self._size)
            if self._group[0] != number:
                self._group = number, self._sort(number)
            indices += self._group[1][place : place + size - len(indices)]
        return indices

    def _sort(self, number: int) -> list[int]:
        # 50 x train_batch samples of the shuffled order. A group may span two epochs.
        indices = np.array(super().take(number * self._size, self._size))
        longest_first = np.argsort(-self._lengths[indices], kind="stable")
        batches = indices[longest_first].reshape(_GROUPED, self._train_batch)
        order = np.random.default_rng(mix_seed(self._seed, number)).permutation(_GROUPED)
        # Batch 0 of the sorted group has the longest samples.
        if number == 0:
            order = np.array([0, *order[order != 0]])
        found: list[int] = batches[order].reshape(-1).tolist()
        return found


class RankBatches(Sampler[list[int]]):
    """One rank's micro batches: the rank-th part of each `micro_batch x world_size` samples of the run."""

    def __init__(self, order: SampleOrder, *, start: int, micro_batch: int, rank: int, world_size: int) -> None:
        self._order, self._start = order, start
        self._micro_batch, self._rank, self._world_size = micro_batch, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        # No communication is needed, and the union over the ranks is the same for any world size.
        first = self._start + self._rank * self._micro_batch
        for start in count(first, self._micro_batch * self._world_size):
            yield self._order.take(start, self._micro_batch)
