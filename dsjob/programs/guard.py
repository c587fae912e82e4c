"""Watches a rank of a program, from a thread: starts the watchdog as soon as the program has a process group.

Until then, nothing here imports torch. Ranks that `launch` started report to the folder that they share with it; those
of another launcher use the store of the process group.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dsjob.after_import import call_after_import
from dsjob.errors import LaunchError
from dsjob.programs.folder import conclude
from dsjob.ranks.failures import Failure

if TYPE_CHECKING:
    from dsjob.ranks.watchdog import Position, StoreBoard, Watchdog

_PERIOD = 0.25  # seconds between looks for a process group


class Guard:
    """The watch over this process, one rank. folder: shared with the launcher, or "". run_dir: for what is recorded, or
    ""."""

    def __init__(self, folder: str, run_dir: str) -> None:
        self.folder, self.run_dir = folder, run_dir
        self._process, self._began = os.getpid(), time.monotonic()
        self._over = threading.Event()
        self._watchdog: Watchdog | None = None
        self._board: StoreBoard | None = None
        threading.Thread(target=self._wait_for_group, name="dsjob-guard", daemon=True).start()

    @property
    def is_here(self) -> bool:
        """Whether this process is the rank itself, rather than a fork of it, such as a loader's worker."""
        return os.getpid() == self._process

    def end(self, code: int, message: str) -> None:
        """The program has ended on this rank, with exit code `code`. Without a launcher, writes result.json."""
        self._over.set()
        distributed: Any = sys.modules.get("torch.distributed")
        if self._watchdog is None and self.folder and getattr(distributed, "is_initialized", bool)():
            self._watch(distributed)  # the program was short; the other ranks must learn of its end
        if self._watchdog is not None and not code:  # else it may still hang
            self._watchdog.stop()
        if self.run_dir and not self.folder:
            conclude(self.run_dir, code, message, time.monotonic() - self._began)

    def blame(self, error: BaseException, failure: Failure) -> Failure:
        """What to report for `error`, which has ended the program: `failure`, or, if that is known here, that another
        rank has caused it. The ranks of another launcher are told."""
        position = _set_doing("ending")
        failure = replace(failure, stage=position.stage) if position is not None else failure
        if self._board is None or self._watchdog is None:
            return failure
        if failure.follows:
            from dsjob.launch.joined import describe_lost

            lost = describe_lost(error, failure, self._board, self._watchdog)
            return replace(failure, message=lost.message, hint=lost.hint, exit_code=lost.exit_code)
        with suppress(RuntimeError):  # the store is gone, so nobody could read it
            self._board.tell_failed(failure.message)
        return failure

    def _wait_for_group(self) -> None:
        while not self._over.wait(_PERIOD):
            distributed: Any = sys.modules.get("torch.distributed")
            if getattr(distributed, "is_initialized", bool)():
                self._watch(distributed)
                return

    def _watch(self, distributed: Any) -> None:
        from dsjob.ranks.rendezvous import read_timeout
        from dsjob.ranks.watchdog import FolderBoard, StoreBoard, Watchdog, position

        if position.doing == "starting":  # else the engine says more
            position.doing = "running"
        rank, size = distributed.get_rank(), distributed.get_world_size()
        timeout = 1800.0
        with suppress(LaunchError):  # the program has a group of its own making, with another timeout
            timeout = read_timeout()
        if self.folder:
            self._watchdog = Watchdog(FolderBoard(self.folder, rank), rank=rank, timeout=timeout)
        elif size > 1:
            from dsjob.torch_private import get_store

            self._board = StoreBoard(get_store(), rank, size)
            self._watchdog = Watchdog(self._board, rank=rank, timeout=timeout)


def _set_doing(what: str) -> Position | None:
    """Returns where this process is; None if nothing keeps track of it."""
    watchdog: Any = sys.modules.get("dsjob.ranks.watchdog")
    if watchdog is None:
        return None
    watchdog.position.doing = what
    found: Position = watchdog.position
    return found


guard: Guard | None = None  # of this process, if it is a rank


def begin(folder: str, run_dir: str) -> Guard:
    """Begins to watch this process. See `Guard`."""
    global guard
    guard = Guard(folder, run_dir)
    for awaited, name in (
        ("torch.distributed.rendezvous", "dsjob.ranks.loopback"),
        ("transformers.trainer", "dsjob.programs.trainer_stop"),
        ("transformers.integrations.deepspeed", "dsjob.programs.contradictions"),
        ("accelerate.utils.deepspeed", "dsjob.programs.origins"),
        ("accelerate.accelerator", "dsjob.programs.process_group"),
        ("dsjob.deepspeed", "dsjob.programs.recording"),
    ):
        call_after_import(awaited, partial(_install, name))
    return guard


def _install(name: str) -> None:
    if guard is not None and guard.is_here:
        import_module(name).install()
