"""The order of training samples. It depends only on the seed and the number of samples already seen.

Epochs follow each other without a gap, each shuffled differently, so every batch is full. A step takes the next
`train_batch` samples on any number of ranks, so a run that is resumed on another number of ranks sees the same data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


def mix_seed(seed: int, number: int) -> int:
    """Derives the seed of an epoch or sample from the run's seed and its number. Multiplying by a large prime keeps
    neighbouring seeds from sharing epochs: seed 1, epoch 2 is not seed 2, epoch 1."""
    return (seed * 1_000_003 + number) % 2**63


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The endless sequence of sample indices of a dataset with `length` samples."""

    length: int
    seed: int
    shuffle: bool

    def epoch(self, number: int) -> Sequence[int]:
        """The order of epoch `number`: a permutation of all indices."""
        if not self.shuffle:
            return range(self.length)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, number))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order

    def stream(self, start: int) -> Iterator[int]:
        """Yields the sample indices of the run, endlessly, beginning with sample number `start`."""
        # The epoch, and the place in it.
        number, position = divmod(start, self.length)
        while True:
            order = self.epoch(number)
            for index in range(position, self.length):
                yield order[index]
            number, position = number + 1, 0


class RankBatches(Sampler[list[int]]):
    """One rank's micro batches: the rank-th part of each `micro_batch x world_size` samples of the stream."""

    def __init__(self, order: SampleOrder, *, start: int, micro_batch: int, rank: int, world_size: int) -> None:
        self._order, self._start = order, start
        self._micro_batch, self._rank, self._world_size = micro_batch, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        # Every rank walks the same stream and takes its own slice, so no communication is needed, and the union over
        # the ranks is the same for any world size.
        stream = self._order.stream(self._start)
        first = self._rank * self._micro_batch
        while True:
            together = [next(stream) for _ in range(self._micro_batch * self._world_size)]
            yield together[first : first + self._micro_batch]
