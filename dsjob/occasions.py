"""When a checkpoint is due other than by the step: signals, a touched file, minutes; and what ranks agree on for that.

A handler sets a flag and does nothing else. At the end of a step all ranks add up what they know in one collective: at
most every half second, so that it costs nothing where steps are short.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dsjob.mesh import World
from dsjob.spec import Checkpoint

_SECONDS = 0.5  # between two agreements of several ranks
_MOST_STEPS = 1000


@dataclass(frozen=True)
class Agreed:
    """What holds on every rank: `saves`: a checkpoint is due; `stops`: and the end after it; `news`: of a save in the
    background."""

    saves: bool = False
    stops: bool = False
    news: bool = False


class Occasions:
    """Watches over signals, the file `request` and the clock for one run."""

    def __init__(self, spec: Checkpoint, world: World, request: str | None) -> None:
        self._spec, self._world, self._request = spec, world.everyone, request
        self._asked = self._stopped = False
        self._saved_at = self._agreed_at = time.monotonic()
        self._agreed_step = self._next = 0

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Takes SIGTERM and SIGUSR1 for requests while the block runs; `step`: the one that training begins at."""
        self._saved_at = self._agreed_at = time.monotonic()
        self._agreed_step = self._next = step
        if not self._spec.on_signal or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._take) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _: Any) -> None:
        self._asked = True
        self._stopped = self._stopped or number == signal.SIGTERM

    def note_save(self) -> None:
        """A checkpoint is made: what asked for it has got it, and the minutes are counted anew."""
        self._asked, self._saved_at = False, time.monotonic()
        if self._world.rank == 0 and self._request and os.path.exists(self._request):
            os.unlink(self._request)

    def agree(self, step: int, *, news: bool) -> Agreed:
        """What is due after `step`, on all ranks alike; `news`: of a save in the background, as this rank knows it."""
        if self._world.world_size == 1:
            return Agreed(self._is_due(), self._stopped, news)
        if step < self._next:
            return Agreed()
        now = time.monotonic()
        pace = (now - self._agreed_at) / max(step - self._agreed_step, 1)
        flags = [float(self._is_due()), float(self._stopped), float(news), pace]
        told = torch.tensor(flags, dtype=torch.float32, device=self._world.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        saves, stops, any_news, seconds = told.tolist()
        self._agreed_at, self._agreed_step = now, step
        self._next = step + min(_MOST_STEPS, max(1, int(_SECONDS / max(seconds, 1e-9))))
        return Agreed(bool(saves), bool(stops), bool(any_news))

    def _is_due(self) -> bool:
        minutes = self._spec.every_minutes
        waited = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        touched = self._world.rank == 0 and self._request is not None and os.path.exists(self._request)
        return self._asked or waited or touched


def crosses(every: float, before: float, after: float) -> bool:
    """Whether a multiple of `every` lies after `before` and not after `after`."""
    return math.floor(after / every + 1e-9) > math.floor(before / every + 1e-9)
