"""A thread on each rank that reports the rank's progress, and ends the rank after another one has failed.

The training loop counts its progress in `position`, at the cost of setting an attribute. Twice a second, the thread
reads it together with the number of collectives entered, and posts both on a board: files in the launcher's private
folder, or the ranks' store if dsjob did not start them.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from os import _exit  # the real one, which `exits` replaces
from typing import Protocol

import torch.distributed as dist
from torch.distributed import Store

from dsjob.errors import LostRankError
from dsjob.ranks import patience
from dsjob.ranks.stalls import (
    FAILED_NAME,
    STACK_SIGNAL,
    Beat,
    describe_stall,
    find_stalled,
    name_beat,
    name_stack,
    name_stage,
    read_posted,
    read_stages,
)
from dsjob.terminal import write_now
from dsjob.torch_private import count_collectives, list_process_groups

OBSERVERS = 4  # only the first ranks search for a late one, since reading all beats takes a message per rank
_PERIOD = 0.5  # seconds between checks
ENDED = "ended"  # what a rank is doing whose program is over
_RATE = 128  # how many ranks may check the store per second


class Position:
    """The progress of this rank, written by its main thread and read by its watchdog."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Resets the progress when a run begins. (A sweep has several runs in one process.)"""
        self.step = self.micro_steps = 0
        self.stage = -1  # in a pipeline
        self.doing = "starting"
        self.board: Board | None = None  # where this rank's watchdog posts, if it has one
        # Waits for a background save, at most so many seconds.
        self.settle: Callable[[float], object] = lambda seconds: None

    def count(self) -> tuple[int, int]:
        """Changes whenever the run makes progress."""
        return self.step, self.micro_steps


position = Position()


class Board(Protocol):
    """Where ranks post their progress. period: seconds between checks. keeper: the rank that hosts the board, which
    disappears when that rank ends; None if it does not."""

    period: float
    keeper: int | None

    def post(self, beat: Beat) -> None:
        """Posts this rank's progress."""

    def read_failure(self) -> str:
        """The cause that the first failed rank reported; "" if none has failed."""

    def answer(self) -> None:
        """Answers requests of other ranks, such as for this rank's stack."""

    def read_beats(self) -> dict[int, Beat]:
        """The last beat of each rank."""


class FolderBoard:
    """A folder that the launcher reads. It requests stacks with a signal, which works even if a rank hangs in C."""

    period = _PERIOD
    keeper: int | None = None

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._path = folder, os.path.join(folder, name_beat(rank))
        # Stays open: faulthandler writes to its descriptor when the process crashes.
        self._stacks = open(os.path.join(folder, name_stack(rank)), "w", encoding="utf-8")  # noqa: SIM115
        faulthandler.enable(self._stacks)
        faulthandler.register(STACK_SIGNAL, self._stacks)

    def post(self, beat: Beat) -> None:
        # Write and rename, so that the launcher never reads an incomplete beat.
        with open(f"{self._path}.new", "w", encoding="utf-8") as file:
            file.write(beat.to_text())
        os.replace(f"{self._path}.new", self._path)

    def read_failure(self) -> str:
        return "reported by the launcher" if os.path.exists(os.path.join(self._folder, FAILED_NAME)) else ""

    def answer(self) -> None:
        """Does nothing: faulthandler answers the launcher's signal."""

    def read_beats(self) -> dict[int, Beat]:
        """The last beat of each rank."""
        return read_posted(self._folder)


class StoreBoard:
    """The ranks' store, through a connection of its own, because another thread may block the main one.

    period: seconds between checks; longer for many ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store.clone(), rank, world_size  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=10))
        self.period = max(_PERIOD, world_size / _RATE)
        # The store of torchrun's agent outlives the ranks. Otherwise, rank 0 hosts it.
        self.keeper: int | None = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0

    def post(self, beat: Beat) -> None:
        self._store.set(f"watch/beat/{self._rank}", beat.to_text())

    def read_failure(self) -> str:
        return self._store.get("watch/failed").decode() if self._store.check(["watch/failed"]) else ""

    def tell_failed(self, cause: str) -> None:
        """Reports to the other ranks that this one has failed. The first cause reported wins.

        If this rank hosts the store, it gives the others time to read it.
        """
        # Atomic: it only writes if nothing is there.
        self._store.compare_set("watch/failed", "", cause)
        if self._rank == self.keeper:
            time.sleep(self.period)

    def answer(self) -> None:
        if self._store.check([f"watch/asked/{self._rank}"]) and not self._store.check([f"watch/stack/{self._rank}"]):
            self._store.set(f"watch/stack/{self._rank}", "\n".join(list_main_frames()))

    def read_beats(self) -> dict[int, Beat]:
        """The last beat of each rank."""
        ranks = self._find_posted(range(self._world_size))
        texts = self._store.multi_get([f"watch/beat/{rank}" for rank in ranks])
        return {rank: Beat.from_text(text.decode()) for rank, text in zip(ranks, texts, strict=True)}

    def _find_posted(self, ranks: Sequence[int]) -> list[int]:
        """The ranks that have posted a beat. Nearly always all have, so the store is asked for many at once."""
        if self._store.check([f"watch/beat/{rank}" for rank in ranks]):
            return list(ranks)
        # Some are missing: search in halves rather than ask for each rank.
        half = len(ranks) // 2
        return [*self._find_posted(ranks[:half]), *self._find_posted(ranks[half:])] if half else []

    def ask_for_stack(self, rank: int, seconds: float) -> Sequence[str]:
        """The stack of another rank's main thread; empty if that rank does not respond."""
        self._store.set(f"watch/asked/{rank}", "")
        end = time.monotonic() + seconds
        while not self._store.check([f"watch/stack/{rank}"]):
            if time.monotonic() > end:
                return ()
            self.answer()  # that rank may be this one, or be waiting for this one's stack
            time.sleep(0.1)
        return str(self._store.get(f"watch/stack/{rank}").decode()).splitlines()


def list_main_frames() -> list[str]:
    """The stack of this process's main thread, innermost frame first."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]


def wait_until_stuck(seconds: float, over: threading.Event) -> list[str]:
    """Waits until this process (the only rank) makes no progress for so many seconds. Returns its main thread's stack.

    Empty if the run is `over` earlier.
    """
    seen, moved = position.count(), time.monotonic()
    while time.monotonic() - moved < seconds:
        if over.wait(min(_PERIOD, seconds)):
            return []
        # Saving and ending may take long without counting as progress.
        if position.count() != seen or position.doing in ("saving", "ending"):
            seen, moved = position.count(), time.monotonic()
    return list_main_frames()


def explain_stall(board: StoreBoard) -> str:
    """A message about the rank that the others wait for, with its stack; "" if all have made the same progress."""
    beats = board.read_beats()
    most = max((beat.collectives for beat in beats.values()), default=0)
    behind = [rank for rank, beat in beats.items() if beat.collectives < most]
    stalled = find_stalled(beats, behind, (), {})
    if not stalled:
        return ""
    stacks = {stalled[0]: board.ask_for_stack(stalled[0], 2 * patience.TO_NOTICE + 2 * board.period)}
    message, stack = describe_stall(stalled, beats, (), stacks)
    message = name_stage(message, read_stages(beats))
    return f"{message}\n{stack}" if stack else message


class Watchdog:
    """The thread. timeout: seconds that a collective may take. Shortly before they are over, it searches for the late
    rank."""

    def __init__(self, board: Board, *, rank: int, timeout: float) -> None:
        self._board, self._rank, self._timeout = board, rank, timeout
        self.told = False  # whether it has printed which rank is late, with its stack
        self._moved, self._last, self._warned, self._posted = time.monotonic(), (-1, -1, -1), False, 0.0
        self._stopped = threading.Event()
        position.board = board
        self._posting = threading.Lock()
        threading.Thread(target=self._run, name="dsjob-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stops watching, because the run has ended on this rank. Failures of other ranks no longer matter."""
        # Under the lock, because the thread must not post afterwards that this rank still runs.
        with self._posting, suppress(RuntimeError, OSError):  # the store or the folder is gone
            self._stopped.set()
            self._board.post(replace(read_beat(), doing=ENDED))

    def _run(self) -> None:
        looked = False
        while not self._stopped.is_set():
            try:
                failure = self._look()
                looked = True
            except (RuntimeError, OSError):  # the store or the folder is gone, and so is the process that hosts it
                if looked and self._board.keeper not in (None, self._rank):
                    self._leave(f"rank {self._board.keeper}, which hosts the ranks' store, is gone", lost=True)
                return
            if failure:
                self._leave(f"another rank has failed: {failure}")
            self._stopped.wait(self._board.period)

    def _look(self) -> str:
        """Posts this rank's progress. Returns the cause if another rank has failed, otherwise ""."""
        beat, now = read_beat(), time.monotonic()
        # Any change counts: collectives go on during an evaluation, while steps do not.
        moved = beat.progress != self._last
        if moved:
            self._moved, self._last, self._warned = now, beat.progress, False
        # Without progress, post less often: thousands of ranks may share the store.
        if moved or now - self._posted > 4 * self._board.period:
            with self._posting:
                if self._stopped.is_set():
                    return ""
                self._board.post(beat)
            self._posted = now
        self._board.answer()
        failure = self._board.read_failure()
        # Search shortly before the timeout: then NCCL aborts the process.
        if now - self._moved > 0.9 * self._timeout and not self._warned and self._rank < OBSERVERS:
            self._warned = True
            self._warn()
        return failure

    def _warn(self) -> None:
        """Prints which rank is late, before NCCL aborts the process without running any more Python code."""
        found = explain_stall(self._board) if isinstance(self._board, StoreBoard) else ""
        if found and not found.startswith(f"rank {self._rank} "):
            write_now(f"dsjob: rank {self._rank} is waiting: {found}")
            self.told = "\n" in found

    def _leave(self, why: str, *, lost: bool = False) -> None:
        """Ends this rank, unless its main thread is about to. It might wait for ever for the failed rank.

        lost: the store is gone. That also happens if the rank that hosts it has finished; then this rank is finishing
        too.
        """
        began = time.monotonic()
        # Let a save that is nearly done finish.
        while position.doing == "saving" and time.monotonic() - began < patience.TO_SAVE:
            self._stopped.wait(_PERIOD)
        self._stopped.wait(max(0.0, patience.TO_NOTICE - (time.monotonic() - began)))
        # The main thread is about to report the real cause. Ending now would hide it.
        if position.doing == "ending":
            self._stopped.wait(patience.TO_TELL)
        if self._stopped.is_set() or (lost and position.doing == "finishing"):
            return
        # A background save that has not been committed would be lost with this process.
        position.settle(patience.TO_SETTLE)
        if isinstance(self._board, StoreBoard):
            write_now(f"dsjob: rank {self._rank} ends because {why}")
        # Not sys.exit: the main thread may hang in C, where no Python exception reaches it.
        _exit(LostRankError.exit_code)


def read_beat() -> Beat:
    """The current progress of this rank."""
    entered = joint = 0
    # Sequence numbers count the collectives entered, whether or not they have finished.
    if dist.is_initialized():
        for group in list_process_groups():
            try:
                number, everyone = count_collectives(group), dist.get_world_size()
            except (RuntimeError, ValueError):  # no sequence numbers, or groups that the main thread is destroying
                continue
            entered += number
            joint += number if group.size() == everyone else 0
    return Beat(position.step, position.micro_steps, entered, position.doing, time.time(), joint, position.stage)
