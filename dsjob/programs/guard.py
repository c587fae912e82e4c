"""Watches a rank of a program, from a thread: starts the watchdog as soon as the program has a process group.

Until then, nothing here imports torch. Ranks that `launch` started report to the folder that they share with it; those
of another launcher use the store of the process group.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsjob.ranks.watchdog import StoreBoard, Watchdog

_PERIOD = 0.25  # seconds between looks for a process group
_MINUTES = "DEEPSPEED_TIMEOUT"  # of a collective, as in `init_distributed`


class Guard:
    """The watch over this process, one rank. folder: shared with the launcher, or "". run_dir: for what is recorded, or
    ""."""

    def __init__(self, folder: str, run_dir: str) -> None:
        self.run_dir = run_dir
        self._folder, self._process = folder, os.getpid()
        self._over = threading.Event()
        self._watchdog: Watchdog | None = None
        self._board: StoreBoard | None = None
        threading.Thread(target=self._wait_for_group, name="dsjob-guard", daemon=True).start()

    @property
    def is_here(self) -> bool:
        """Whether this process is the rank itself, rather than a fork of it, such as a loader's worker."""
        return os.getpid() == self._process

    def end(self) -> None:
        """The program has ended on this rank: failures of other ranks no longer matter."""
        self._over.set()
        if self._watchdog is not None:
            self._watchdog.stop()

    def fail(self, message: str) -> None:
        """The program has failed on this rank, which reports that by itself; tells the other ranks where it can."""
        self._over.set()
        _set_doing("ending")
        if self._board is not None:
            with suppress(RuntimeError):  # the store is gone, so nobody could read it
                self._board.tell_failed(message)

    def _wait_for_group(self) -> None:
        while not self._over.wait(_PERIOD):
            distributed: Any = sys.modules.get("torch.distributed")
            if getattr(distributed, "is_initialized", bool)():
                self._watch(distributed)
                return

    def _watch(self, distributed: Any) -> None:
        from dsjob.ranks.watchdog import FolderBoard, StoreBoard, Watchdog

        _set_doing("running")
        rank, size = distributed.get_rank(), distributed.get_world_size()
        timeout = 60 * float(os.environ.get(_MINUTES, "30"))
        if self._folder:
            self._watchdog = Watchdog(FolderBoard(self._folder, rank), rank=rank, timeout=timeout)
        elif size > 1:
            from dsjob.torch_private import get_store

            self._board = StoreBoard(get_store(), rank, size)
            self._watchdog = Watchdog(self._board, rank=rank, timeout=timeout)


def _set_doing(what: str) -> None:
    watchdog: Any = sys.modules.get("dsjob.ranks.watchdog")
    if watchdog is not None:
        watchdog.position.doing = what


guard: Guard | None = None  # of this process, if it is a rank


def begin(folder: str, run_dir: str) -> Guard:
    """Begins to watch this process. See `Guard`."""
    global guard
    guard = Guard(folder, run_dir)
    return guard
