"""Training loaders for programs with their own loop: one epoch per iteration, or a loader that never ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from dsjob.errors import DataError


class Endless(Protocol):
    """A loader of a rank's micro batches. `samples_per_epoch`: over all ranks; None if unknown."""

    dataset: Any
    samples_per_epoch: int | None

    def iterate_epoch(self, number: int, batches: int | None) -> Iterator[Any]: ...


class Epochs:
    """A training loader for a program's own loop. Each iteration is one epoch; `len` is its number of micro batches."""

    def __init__(self, loader: Endless, samples_per_pass: int) -> None:
        self._loader, self._samples_per_pass = loader, samples_per_pass
        self.dataset = loader.dataset
        self.samples_per_epoch = loader.samples_per_epoch  # over all ranks; None for a stream
        self.epoch = 0

    def __len__(self) -> int:
        if self.samples_per_epoch is None:
            raise TypeError("an iterable dataset has no length")
        return max(1, self.samples_per_epoch // self._samples_per_pass)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._loader.iterate_epoch(epoch, None if self.samples_per_epoch is None else len(self))


class RepeatingLoader:
    """Repeats any loader endlessly: starts it again whenever it ends."""

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
            raise DataError("RepeatingLoader: the loader yields no batches") from None
