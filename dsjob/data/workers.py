"""Initialises the worker processes of DataLoaders."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dsjob.errors import DataError
from dsjob.ranks.mesh import World

MOST = 1024  # worker processes of a loader, as in the schema of data.num_workers


def outlive_stop(number: int) -> None:
    """Makes a worker process survive the signal on which its rank saves and stops.

    Terminals and schedulers send the signal to every process of a job, but a rank needs its workers to finish its step.
    A second SIGTERM, which torch sends to workers that do not stop in time, ends the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def choose_options(world: World, seed: int, *, num_workers: int, pin_memory: bool) -> dict[str, Any]:
    """The options of a DataLoader that reads training data on this rank."""
    return {
        "num_workers": num_workers,
        "worker_init_fn": outlive_stop,
        "pin_memory": pin_memory and world.device.type == "cuda",
        # Without a generator, a DataLoader draws from the global one when it starts. A resumed run would draw once
        # more than one that ran through.
        "generator": torch.Generator().manual_seed(seed + world.data_rank),
    }


def make_outliving(loader: Any, name: str) -> None:
    """Makes the workers of a user's DataLoader survive that signal too. Its own worker_init_fn runs afterwards.

    Raises DataError if it has too many.
    """
    if loader.num_workers > MOST:
        raise DataError(f"{name} has num_workers={loader.num_workers:,}, more than {MOST:,}", hint="lower it")
    own = loader.worker_init_fn
    if own is not outlive_stop and getattr(own, "func", None) is not _begin:
        loader.worker_init_fn = outlive_stop if own is None else partial(_begin, own)


def _begin(own: Callable[[int], object], number: int) -> None:
    outlive_stop(number)
    own(number)
