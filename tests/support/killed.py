"""Jobs that are killed: the `dsjob` command as a fork, and its ranks as forks of that (`jobs.call`)."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forks import get_forks
from jobs import DSJOB, RANKS, call, clean_env

SECONDS = 90.0  # what nothing here takes: it hangs then


class Killable:
    """A running `dsjob` command."""

    def __init__(self, *arguments: str, cwd: Path, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        given = ([DSJOB, *arguments], str(cwd), clean_env(**env), self._folder.name)
        self._process = get_forks().Process(target=call, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def __enter__(self) -> Killable:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.pid, *self.ranks]:
            _kill(pid)
        self._process.join()
        self._folder.cleanup()

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks by rank, where the launcher has started any; one rank is the command itself."""
        return [int(pid) for pid in self._read(RANKS).split()]

    @property
    def output(self) -> str:
        return self._read("stdout")

    @property
    def errors(self) -> str:
        return self._read("stderr")

    @property
    def ended(self) -> bool:
        return self._process.exitcode is not None

    def kill(self, *pids: int) -> None:
        """kill -9, one right after the other."""
        for pid in pids:
            _kill(pid)

    def wait(self) -> int:
        """Waits until the command and all its ranks are gone; its exit code. A rank that lives on fails the test."""
        self._process.join(SECONDS)
        code = self._process.exitcode
        assert code is not None, f"it hangs\n{self.output}\n{self.errors}"
        wait_until(lambda: not any(map(is_alive, self.ranks)), 10, "a rank lives on without its launcher")
        return code

    def _read(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_text() if path.exists() else ""


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be in the table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
