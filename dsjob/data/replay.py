"""Says how far a resumed run has read the samples again that it has seen before, so that it does not seem to hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Event, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

EVERY = 5.0  # seconds between two messages
Counts = npt.NDArray[np.int64]


class Replay:
    """Counts the samples that are read again, in this process or in worker processes.

    total: samples. say: shows a text to the user. readers: the number of processes that read; every `copies` of them
    read the same samples.
    """

    def __init__(
        self, total: int, name: str, say: Callable[[str], None] | None, *, readers: int = 1, copies: int = 1
    ) -> None:
        self._total, self._name, self._say, self._copies = total, name, say, copies
        # int64 [readers], in shared memory: each reader adds to its own element.
        self.shared = torch.zeros(readers, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._counts: Counts = self.shared.numpy()

    def add(self, samples: int) -> None:
        """Counts samples that this process has read."""
        self._counts[0] += samples

    @property
    def done(self) -> int:
        """The samples that have been read again so far."""
        return int(self._counts.sum()) // self._copies

    def follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields `batches`. Until all samples are read again, says every few seconds how far it is while a batch is
        awaited."""
        # Before the thread starts: this may fork worker processes.
        iterator = iter(batches)
        if self._say is None:
            yield from iterator
            return
        awaited, ended = Event(), Event()
        Thread(target=self._tell, args=(self._say, awaited, ended), name="replay", daemon=True).start()
        try:
            while self.done < self._total:
                awaited.set()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                awaited.clear()
                yield batch
        finally:
            ended.set()
        yield from iterator

    def _tell(self, say: Callable[[str], None], awaited: Event, ended: Event) -> None:
        began, said = time.monotonic(), 0
        while not ended.wait(EVERY):
            done, seconds = self.done, time.monotonic() - began
            if awaited.is_set() and said < done < self._total:
                said = done
                left = _show(seconds * (self._total - done) / done)
                say(f"{done:,} of {self._total:,} samples of {self._name} read again, about {left} left")


def _show(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
