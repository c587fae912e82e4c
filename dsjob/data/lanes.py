"""Lanes: the parts of an iterable dataset that are read side by side, and which ranks read which.

A dataset with `num_shards` and `shard(num_shards=..., index=...)`, such as an IterableDataset of Hugging Face, has at
least one lane per rank, so each rank reads only its part. Any other dataset is one lane: every rank reads all of it,
and the ranks take turns.

A lane can be shuffled window by window. The order in a window is a function of the seed, so a resumed lane needs only
the state of the dataset before the window, and reads the window again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from dsjob.data.order import mix_seed
from dsjob.data.permutation import Permutation
from dsjob.data.replay import Counts
from dsjob.data.samples import number_stream
from dsjob.torch_private import hiding_worker


def count_lanes(dataset: Any, world_size: int, workers: int) -> int:
    """How many lanes a run begins with on `world_size` ranks with so many worker processes each."""
    shards = getattr(dataset, "num_shards", None)
    if not isinstance(shards, int) or shards < 1 or not callable(getattr(dataset, "shard", None)):
        return 1
    full = world_size * max(1, workers)
    if shards >= full:
        return full
    # A divisor of the ranks, so that equally many share each lane.
    return max(number for number in range(1, world_size + 1) if world_size % number == 0 and number <= shards)


@dataclass(frozen=True)
class Share:
    """A rank's share of a lane: it is the `own`-th of the `ranks` ranks that read it."""

    lane: int
    own: int
    ranks: int


def divide_lanes(lanes: int, rank: int, world_size: int) -> list[Share]:
    """The lanes of a rank. It reads several if a run goes on with fewer ranks, and shares one if with more."""
    if lanes >= world_size:
        # Lane l belongs to rank l % world_size.
        return [Share(lane, 0, 1) for lane in range(rank, lanes, world_size)]
    # Ranks lane, lane + lanes, lane + 2 x lanes, ... share this lane.
    lane = rank % lanes
    return [Share(lane, rank // lanes, len(range(lane, world_size, lanes)))]


@dataclass(frozen=True)
class Position:
    """How far a lane has been read: the number of whole passes, the samples of the current one, and the dataset's own
    state, if it has any. before: the samples of the current pass that precede this state; None if it is all of them."""

    passes: int = 0
    samples: int = 0
    state: Mapping[str, Any] | None = None
    before: int | None = None


class Lane:
    """One lane of a dataset, read from `position` on, pass after pass.

    window: the number of samples that are shuffled together; 0 keeps the dataset's order. again: int64 [1], counts the
    samples that are read again to get to a position without a state.
    """

    def __init__(
        self,
        dataset: Any,
        index: int,
        lanes: int,
        position: Position,
        name: str,
        *,
        window: int = 0,
        seed: int = 0,
        again: Counts | None = None,
    ) -> None:
        self._dataset, self._index, self._lanes, self._name = dataset, index, lanes, name
        self._begun, self._again, self._window, self._seed = position, again, window, mix_seed(seed, index)
        self._opened: tuple[int, Any] = 0, None  # the samples and the state before the current window
        self._part: Any = None
        self._items: Iterator[Any] = iter(())
        self._passes = position.passes
        self.samples = position.samples  # read in the current pass

    def read(self, size: int) -> list[Any]:
        """The next `size` samples of this pass, as `number_stream` yields them; fewer at its end."""
        if self._part is None:
            self._start()
        items = list(islice(self._items, size))
        self.samples += len(items)
        return items

    def end_pass(self) -> None:
        """Makes the next read begin the next pass."""
        self._part, self._begun = None, Position()
        self._passes, self.samples = self._passes + 1, 0

    @property
    def position(self) -> Position:
        """Where the next read begins."""
        if not has_state(self._part):
            return Position(self._passes, self.samples)
        before, state = self._opened
        if not self._window or self.samples == before + self._window:  # all that was read has been taken
            before, state = self.samples, self._part.state_dict()
        return Position(self._passes, self.samples, state, before)

    def _start(self) -> None:
        dataset = self._dataset
        self._part = dataset.shard(num_shards=self._lanes, index=self._index) if self._lanes > 1 else dataset
        # Before load_state_dict: Hugging Face's datasets ignore the state of another epoch.
        if hasattr(self._part, "set_epoch"):
            self._part.set_epoch(self._passes)
        begun = self._begun
        if begun.state is not None:
            self._part.load_state_dict(begun.state)
        # With a state, the dataset skips these samples itself. Otherwise they are read again and dropped below.
        before = begun.samples if begun.before is None else begun.before
        first = before if begun.state is not None else 0
        self._items = number_stream(_iterate(self._part), self._name, first)
        if self._window:
            self._items = self._shuffle(self._items, first, begun.state)
        for _ in islice(self._items, begun.samples - first):
            if self._again is not None and begun.state is None:
                self._again += 1

    def _shuffle(self, items: Iterator[Any], first: int, state: Any) -> Iterator[Any]:
        """The items, of which `first` others came before, in another order in each window. state: the dataset's there;
        None at the beginning of a pass."""
        while window := list(islice(items, self._window)):
            self._opened = first, state
            order = Permutation(len(window), mix_seed(mix_seed(self._seed, self._passes), first))
            yield from (window[place] for place in order[np.arange(len(window))])
            # Not before the first sample of a pass: the state may still be that of the pass before.
            first, state = first + len(window), deepcopy(self._part.state_dict()) if has_state(self._part) else None


def has_state(dataset: Any) -> bool:
    """Whether a dataset can continue where another process has stopped."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def has_shuffle_buffer(dataset: Any) -> bool:
    """Whether a dataset of Hugging Face has a shuffle buffer, which its state_dict leaves out."""
    part = getattr(dataset, "_ex_iterable", None)  # private, but datasets tells it nowhere else
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        part = getattr(part, "ex_iterable", None)
    return False


def _iterate(dataset: Any) -> Iterator[Any]:
    """Iterates over a dataset as if there were no worker processes.

    Many datasets divide their samples among workers. dsjob does that as well, so samples would be lost.
    """
    with hiding_worker():
        iterator = iter(dataset)
    while True:
        with hiding_worker():
            try:
                sample = next(iterator)
            except StopIteration:
                return
        yield sample
