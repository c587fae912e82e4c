"""A thread of each rank that tells where the rank is, and ends it once another one has failed.

The loop counts in `position`, which costs it an attribute. The thread reads that twice a second, with the number of
collectives that were entered, and posts it on a board: files in the launcher's private folder, or the ranks' store
where somebody else has started them.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from os import _exit  # the real one, which `exits` replaces
from typing import Protocol

import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.distributed_c10d import _world

from dsjob.errors import LostRankError
from dsjob.ranks import patience
from dsjob.ranks.stalls import (
    FAILED_NAME,
    RECORD_PREFIX,
    STACK_SIGNAL,
    Beat,
    describe_stall,
    find_stalled,
    name_beat,
    name_stack,
)

OBSERVERS = 4  # the first ranks, which look who is late: to read the beats of all costs each of them a message a rank
_PERIOD = 0.5  # seconds between two looks
_RATE = 128  # ranks that may look at the store in a second


class Position:
    """Where this rank is: written by its main thread, read by its watchdog."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A run begins: a sweep has several in one process."""
        self.step = self.micro_steps = 0
        self.doing = "starting"
        # Brings a save in the background to its end, in at most so many seconds.
        self.settle: Callable[[float], object] = lambda seconds: None

    def count(self) -> tuple[int, int]:
        """What grows while the run gets anywhere."""
        return self.step, self.micro_steps


position = Position()


class Board(Protocol):
    """Where ranks tell of themselves; looked at every `period` seconds. `keeper`: the rank whose end takes it away."""

    period: float
    keeper: int | None

    def post(self, beat: Beat) -> None:
        """Makes a beat known."""

    def read_failure(self) -> str:
        """What the first rank that failed has told; empty where none has."""

    def answer(self) -> None:
        """Gives what the others may have asked of this rank."""


class FolderBoard:
    """A folder that the launcher reads; it asks for stacks by a signal, which even a rank that hangs in C answers."""

    period = _PERIOD
    keeper: int | None = None

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._path = folder, os.path.join(folder, name_beat(rank))
        # Both files stay open: what is written at the end of a process needs its descriptor.
        self._stacks = open(os.path.join(folder, name_stack(rank)), "w", encoding="utf-8")  # noqa: SIM115
        faulthandler.enable(self._stacks)
        faulthandler.register(STACK_SIGNAL, self._stacks)

    def post(self, beat: Beat) -> None:
        # Written beside and renamed: the launcher never reads half a beat.
        with open(f"{self._path}.new", "w", encoding="utf-8") as file:
            file.write(beat.to_text())
        os.replace(f"{self._path}.new", self._path)

    def read_failure(self) -> str:
        return "as the launcher tells" if os.path.exists(os.path.join(self._folder, FAILED_NAME)) else ""

    def answer(self) -> None:
        """Signals are answered by themselves."""


class StoreBoard:
    """The store that ranks have met at, by a connection of its own: another thread may wait in the main one.

    `period`: seconds between two looks, longer for many ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store.clone(), rank, world_size  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=10))
        self.period = max(_PERIOD, world_size / _RATE)
        self.keeper: int | None = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0

    def post(self, beat: Beat) -> None:
        self._store.set(f"watch/beat/{self._rank}", beat.to_text())

    def read_failure(self) -> str:
        return self._store.get("watch/failed").decode() if self._store.check(["watch/failed"]) else ""

    def tell_failed(self, cause: str) -> None:
        """Lets the other ranks know that this one has failed; the first cause that is told stays.

        The rank whose end takes the store away leaves them time to read it.
        """
        self._store.compare_set("watch/failed", "", cause)
        if self._rank == self.keeper:
            time.sleep(self.period)

    def answer(self) -> None:
        if self._store.check([f"watch/asked/{self._rank}"]) and not self._store.check([f"watch/stack/{self._rank}"]):
            self._store.set(f"watch/stack/{self._rank}", "\n".join(list_main_frames()))

    def read_beats(self) -> dict[int, Beat]:
        """What each rank has told last."""
        ranks = self._find_told(range(self._world_size))
        texts = self._store.multi_get([f"watch/beat/{rank}" for rank in ranks])
        return {rank: Beat.from_text(text.decode()) for rank, text in zip(ranks, texts, strict=True)}

    def _find_told(self, ranks: Sequence[int]) -> list[int]:
        """Those that have told of themselves, which nearly always all have: the store is asked for many at once."""
        if self._store.check([f"watch/beat/{rank}" for rank in ranks]):
            return list(ranks)
        half = len(ranks) // 2
        return [*self._find_told(ranks[:half]), *self._find_told(ranks[half:])] if half else []

    def ask_for_stack(self, rank: int, seconds: float) -> Sequence[str]:
        """Where the main thread of another rank is; nothing where that rank does not answer."""
        self._store.set(f"watch/asked/{rank}", "")
        end = time.monotonic() + seconds
        while not self._store.check([f"watch/stack/{rank}"]):
            if time.monotonic() > end:
                return ()
            time.sleep(0.1)
        return str(self._store.get(f"watch/stack/{rank}").decode()).splitlines()


def list_main_frames() -> list[str]:
    """Where the main thread is, innermost first."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]


def wait_until_stuck(seconds: float, over: threading.Event) -> list[str]:
    """Waits until this process, which is alone, has got nowhere for so many seconds; where its main thread is then.

    Empty where the run is `over` before.
    """
    seen, moved = position.count(), time.monotonic()
    while time.monotonic() - moved < seconds:
        if over.wait(min(_PERIOD, seconds)):
            return []
        if position.count() != seen or position.doing in ("saving", "ending"):
            seen, moved = position.count(), time.monotonic()
    return list_main_frames()


def explain_stall(board: StoreBoard) -> str:
    """Which rank the others wait for, and its stack, as far as the store tells; empty where all are equally far."""
    beats = board.read_beats()
    most = max((beat.collectives for beat in beats.values()), default=0)
    behind = [rank for rank, beat in beats.items() if beat.collectives < most]
    stalled = find_stalled(beats, behind, (), {})
    if not stalled:
        return ""
    stacks = {stalled[0]: board.ask_for_stack(stalled[0], 2 * patience.TO_NOTICE + 2 * board.period)}
    message, stack = describe_stall(stalled, beats, (), stacks)
    return f"{message}\n{stack}" if stack else message


class Watchdog:
    """The thread. `timeout`: seconds that a collective may take; before they are over, it looks who is late."""

    def __init__(self, board: Board, *, rank: int, timeout: float) -> None:
        self._board, self._rank, self._timeout = board, rank, timeout
        self.told = False  # who is late, with the stack
        self._moved, self._last, self._warned, self._posted = time.monotonic(), (-1, -1, -1), False, 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="dsjob-watchdog", daemon=True).start()

    def stop(self) -> None:
        """The run has come to its end, by whatever means: what other ranks do is no matter of this one's any more."""
        self._stopped.set()

    def _run(self) -> None:
        looked = False
        while not self._stopped.is_set():
            try:
                failure = self._look()
                looked = True
            except (RuntimeError, OSError):  # the store or the folder is gone: so is whoever keeps it
                if looked and self._board.keeper not in (None, self._rank):
                    self._leave(f"rank {self._board.keeper}, which keeps the ranks' store, is gone", lost=True)
                return
            if failure:
                self._leave(f"another rank has failed: {failure}")
            self._stopped.wait(self._board.period)

    def _look(self) -> str:
        """Tells where this rank is; that another one has failed, or nothing."""
        beat, now = read_beat(), time.monotonic()
        moved = beat.progress != self._last
        if moved:
            self._moved, self._last, self._warned = now, beat.progress, False
        # A rank that does not move posts less often: thousands of ranks share one store.
        if moved or now - self._posted > 4 * self._board.period:
            self._board.post(beat)
            self._posted = now
        self._board.answer()
        failure = self._board.read_failure()
        # Shortly before the timeout: NCCL then aborts the process, and nothing can be read any more.
        if now - self._moved > 0.9 * self._timeout and not self._warned and self._rank < OBSERVERS:
            self._warned = True
            self._warn()
        return failure

    def _warn(self) -> None:
        """Says who is late before NCCL ends the process, which runs no Python any more."""
        found = explain_stall(self._board) if isinstance(self._board, StoreBoard) else ""
        if found and not found.startswith(f"rank {self._rank} "):
            os.write(2, f"dsjob: rank {self._rank} waits: {found}\n".encode())
            self.told = "\n" in found

    def _leave(self, why: str, *, lost: bool = False) -> None:
        """Ends this rank, unless its main thread is about to: it may wait for ever for the rank that has failed.

        `lost`: the store is gone, as it also is once the rank that keeps it is done; so is this one then.
        """
        began = time.monotonic()
        # A save that is nearly done is worth more than a quick end.
        while position.doing == "saving" and time.monotonic() - began < patience.TO_SAVE:
            self._stopped.wait(_PERIOD)
        self._stopped.wait(max(0.0, patience.TO_NOTICE - (time.monotonic() - began)))
        # The main thread is about to report the real cause; ending now would hide it.
        if position.doing == "ending":
            self._stopped.wait(patience.TO_TELL)
        if self._stopped.is_set() or (lost and position.doing == "finishing"):
            return
        position.settle(patience.TO_SETTLE)
        if isinstance(self._board, StoreBoard):
            os.write(2, f"dsjob: rank {self._rank} ends, since {why}\n".encode())
        _exit(LostRankError.exit_code)


def read_beat() -> Beat:
    """Where this rank is now."""
    entered = 0
    # Sequence numbers count collectives that were entered, whether they have ended or not.
    if dist.is_initialized():
        for group in list(_world.pg_map):
            try:
                entered += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            except RuntimeError:  # a group of another backend, or one that is being left
                continue
    return Beat(position.step, position.micro_steps, entered, position.doing, time.time())


def record_collectives() -> None:
    """Has NCCL keep its last collectives, and write them down when one times out. Before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def place_records(run_dir: str) -> None:
    """Where NCCL's record goes: one file of each rank, in the run's folder."""
    logs = os.path.join(run_dir, "logs")
    os.makedirs(logs, exist_ok=True)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(os.path.abspath(logs), RECORD_PREFIX))
