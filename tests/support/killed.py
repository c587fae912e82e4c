"""Jobs that are killed: the `dsjob` command as a fork, and its ranks as forks of that.

All is as in production but how a rank begins: a child of the launcher by fork alone, without a new interpreter, whose
imports would cost the seconds that hundreds of kills do not have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forks import begin_anew, get_forks
from jobs import DSJOB, clean_env, enter

SECONDS = 90.0  # what nothing here takes: it hangs then
_RANKS = "ranks"


class Killable:
    """A running `dsjob` command."""

    def __init__(self, *arguments: str, cwd: Path, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        given = ([DSJOB, *arguments], str(cwd), clean_env(**env), self._folder.name)
        self._process = get_forks().Process(target=_launch, args=given)
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
        return [int(pid) for pid in self._read(_RANKS).split()]

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


def _launch(command: Sequence[str], cwd: str, environment: dict[str, str], folder: str) -> None:
    enter(command, cwd, environment, folder)
    from dsjob.launch import supervisor

    def start(args: Sequence[str], env: Mapping[str, str], output: Any) -> _Rank:
        rank = _Rank(args, env, output, output)
        with open(f"{folder}/{_RANKS}", "a") as file:
            file.write(f"{rank.pid}\n")
        return rank

    supervisor.start_process = start
    from dsjob.cli import main

    sys.exit(main())


class _Rank:
    """What the launcher asks of a subprocess.Popen, for a fork that goes on as the rank that `args` starts."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any) -> None:
        assert tuple(args[1:4]) == ("-P", "-m", "dsjob.launch.rank"), args
        self.args = args
        self._code: int | None = None
        ready, begun = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.close(begun)
                _become_rank(args[4:], env, stdout, stderr)
            finally:
                os._exit(70)
        os.close(begun)
        os.read(ready, 1)  # the launcher signals the group that the rank has made
        os.close(ready)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            time.sleep(0.005)
        return code


def _become_rank(arguments: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for file, descriptor in ((stdout, 1), (stderr, 2)):
        if file is not None:
            os.dup2(file.fileno(), descriptor)
    begin_anew(env)
    from dsjob.launch import rank

    rank.end_rank(rank.run_rank(*arguments))
