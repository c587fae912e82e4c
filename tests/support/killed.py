"""Jobs that are killed: the `dsjob` command as a fork, and its ranks as forks of that (`programs`)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from programs import DSJOB, Program, clean_env

SECONDS = 90.0  # what nothing here takes: it hangs then


class Killable:
    """A running `dsjob` command."""

    def __init__(self, *arguments: str, cwd: Path, **env: str) -> None:
        self._program = Program([DSJOB, *arguments], cwd=cwd, env=clean_env(**env))
        self.pid = self._program.pid

    def __enter__(self) -> Killable:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(self.pid, *self.ranks)
        self._program.wait(SECONDS)

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks by rank, where the launcher has started any; one rank is the command itself."""
        return self._program.ranks

    @property
    def output(self) -> str:
        return self._program.stdout

    @property
    def errors(self) -> str:
        return self._program.stderr

    @property
    def ended(self) -> bool:
        return self._program.returncode is not None

    def kill(self, *pids: int) -> None:
        """kill -9, one right after the other."""
        for pid in pids:
            _kill(pid)

    def wait(self) -> int:
        """Waits until the command and all its ranks are gone; its exit code. A rank that lives on fails the test."""
        try:
            code = self._program.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs\n{self.output}\n{self.errors}") from None
        wait_until(lambda: not any(map(is_alive, self.ranks)), 10, "a rank lives on without its launcher")
        return code


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
