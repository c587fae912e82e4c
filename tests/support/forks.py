"""Processes that begin where torch and dsjob are imported: forks of one that has done nothing else.

Each is as good as a new interpreter, without the seconds that importing takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver, get_context, parent_process, set_start_method
from multiprocessing.context import ForkServerContext
from typing import IO

# None of these starts a thread of torch's, which a fork would lose. FSDP2 imports torch._dynamo at its first use.
PRELOADED = [
    "dsjob.engine.build", "dsjob.training.job", "dsjob.cli.run", "dsjob.document.compose", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "torch._dynamo", "s3fs", "pytest",
]  # fmt: skip


def get_forks() -> ForkServerContext:
    """multiprocessing, with processes that are such forks."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # else it would import the folder dsjob here, which lacks conf and schemas
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONSAFEPATH") if before is None else os.environ.update(PYTHONSAFEPATH=before)
    return context


def begin_anew(environment: Mapping[str, str]) -> None:
    """Gives this process the environment and nothing else. What torch reads at its import it has read before."""
    os.environ.clear()
    os.environ.update(environment)
    set_start_method(None, force=True)  # a fork's own children would be such forks, but without anything imported


def end_with_pytest() -> None:
    """Ends this process once pytest is gone. The system would tell its parent's death, but that is another process."""
    pytest = parent_process()
    assert pytest is not None
    connection.wait([pytest.sentinel])
    os._exit(1)


class Rank:
    """What the launcher asks of a subprocess.Popen, for a fork that goes on as the rank that `args` starts."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], output: IO[bytes] | None) -> None:
        assert tuple(args[1:4]) == ("-P", "-m", "dsjob.launch.rank"), args
        self.args = args
        self._code: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else both processes would write what is left
        ready, begun = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.close(begun)
                _become_rank(args[4:], env, output)
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


def _become_rank(arguments: Sequence[str], env: Mapping[str, str], output: IO[bytes] | None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if output is not None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    begin_anew(env)
    from dsjob.contract.environment import watch_output
    from dsjob.launch import rank

    with watch_output():
        rank.end_rank(rank.run_rank(*arguments))
