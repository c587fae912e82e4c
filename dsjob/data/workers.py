"""The processes of a DataLoader: how they begin."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any


def outlive_stop(number: int) -> None:
    """Begins a worker process: it outlives the signal that its rank saves for.

    Terminals and schedulers send that to every process of a job, and a rank whose workers are gone cannot go on to the
    end of its step. A second SIGTERM, which torch sends to workers that are late, ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def make_outliving(loader: Any) -> None:
    """Has the workers of somebody else's DataLoader outlive the stop, too; its own function begins them after that."""
    own = loader.worker_init_fn
    if own is not outlive_stop and getattr(own, "func", None) is not _begin:
        loader.worker_init_fn = outlive_stop if own is None else partial(_begin, own)


def _begin(own: Callable[[int], object], number: int) -> None:
    outlive_stop(number)
    own(number)
