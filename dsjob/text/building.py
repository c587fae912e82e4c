"""The lock under which one process of a machine builds a token cache while the others wait.

The kernel releases the lock when the process ends, however it ends. While it builds, the process writes a sign of life
into the lock's file, from a thread. Those who wait show it, and give up if it no longer changes: a process on another
machine, which shares the folder, may be gone with its lock still held.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from dsjob.errors import StorageError
from dsjob.ranks import patience
from dsjob.ranks.watchdog import position
from dsjob.terminal import write_now

_POLL = 0.1  # seconds
_SIZE, _SHOWN = 4096, 256  # bytes of a sign of life, and characters of what it says; JSON writes one as up to 12 bytes
Tell = Callable[[str], None]


@contextmanager
def building(lock: Path, what: str) -> Iterator[Tell]:
    """Holds the lock. The block receives a function, which it calls with how far it is.

    what: what the block does, for messages. Raises StorageError if another process holds the lock, and gives no sign of
    life.
    """
    with open(os.open(lock, os.O_CREAT | os.O_RDWR, 0o600), "r+b", buffering=0) as file:
        waiting = _Waiting(lock, file.fileno())
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # does not block, so that signals are handled
                break
            except BlockingIOError:
                waiting.look()
                time.sleep(_POLL)
        signs, over, before = _Signs(file.fileno(), what), Event(), position.doing
        thread = Thread(target=signs.give, args=(over,), name="building", daemon=True)
        thread.start()
        try:
            yield signs.tell
        finally:
            over.set()
            thread.join()
            position.doing = before


class _Signs:
    """The signs of life of this process, which builds."""

    def __init__(self, file: int, what: str) -> None:
        self._file, self._what, self._far, self._count = file, what, "", 0
        self._began = self._said = time.monotonic()

    def tell(self, far: str) -> None:
        """Notes how far this process is."""
        self._far = far

    def give(self, over: Event) -> None:
        """Writes a sign of life every second, and says every minute how far this process is."""
        while not over.is_set():
            self._count += 1
            doing = f"{self._what}: {self._far}" if self._far else self._what
            position.doing = doing  # the watchdog posts it for ranks on other machines
            sign = {"host": socket.gethostname(), "process": os.getpid(), "parent": os.getppid(), "count": self._count}
            # Always as long, so that a reader never sees the end of an earlier one.
            text = json.dumps({**sign, "rank": os.environ.get("RANK", ""), "doing": doing[:_SHOWN]})
            with suppress(OSError):  # a full disk, of which the build itself will tell
                os.pwrite(self._file, text.ljust(_SIZE)[:_SIZE].encode(), 0)
            now = time.monotonic()
            if now - self._said >= (patience.TO_SAY if self._said == self._began else patience.TO_SAY_AGAIN):
                self._said = now
                _say(f"{_name_self()} has been {doing} for {now - self._began:.0f} s")
            over.wait(1.0)


class _Waiting:
    """What this process, which waits for the lock, knows of the one that holds it."""

    def __init__(self, lock: Path, file: int) -> None:
        self._lock, self._file, self._sign = lock, file, dict[str, Any]()
        self._began = self._changed = self._said = time.monotonic()

    def look(self) -> None:
        """Reads the sign of life of the process that builds, and says every minute how far it is. Raises StorageError
        if it gives none for long."""
        sign, now = _read_sign(self._file), time.monotonic()
        if sign != self._sign:
            self._sign, self._changed = sign, now
        if not sign:  # it has only just begun, or is an earlier version of dsjob
            return
        who = f"process {sign['process']} on {sign['host']}"
        if now - self._changed > patience.TO_MISS:
            raise StorageError(
                f"{who} holds the lock {self._lock} of a token cache, but has shown no sign of life for"
                f" {patience.TO_MISS:.0f} s",
                hint="end that process; if its machine is gone, delete the lock",
            )
        silent = patience.TO_SAY if self._said == self._began else patience.TO_SAY_AGAIN
        # A process of the same launcher says it itself.
        if now - self._said >= silent and sign["parent"] != os.getppid():
            self._said = now
            rank = f"rank {sign['rank']}, " if sign["rank"] else ""
            _say(f"{_name_self()} has waited {now - self._began:.0f} s for {rank}{who}, which is {sign['doing']}")


def _read_sign(file: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(file, _SIZE, 0))
        return found if {"host", "process", "parent", "count", "rank", "doing"} <= found.keys() else {}
    except (ValueError, AttributeError):
        return {}


def _name_self() -> str:
    return f"rank {os.environ['RANK']}" if "RANK" in os.environ else f"process {os.getpid()}"


def _say(text: str) -> None:
    write_now(f"dsjob: {text}")
