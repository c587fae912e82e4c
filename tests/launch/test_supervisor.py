"""How a launcher watches its ranks, by processes of a line each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsjob.errors import DsjobError, LaunchError
from dsjob.launch import supervisor
from dsjob.launch.supervisor import Supervisor
from dsjob.ranks import patience
from dsjob.ranks.failures import SAVED_CODES
from dsjob.ranks.signals import list_heeded


def run(folder: Path, code: str, nproc: int = 2) -> None:
    for name in ("private", "logs"):
        (folder / name).mkdir()
    found = Supervisor(str(folder / "private"), str(folder / "logs"), 1800.0, 60.0)
    found.run([sys.executable, "-c", f"import os, sys, time; rank = os.environ['RANK']; {code}"], {}, nproc)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "TO_ANSWER", 0.2)
    monkeypatch.setattr(patience, "TO_END", 0.2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("code", SAVED_CODES)
def test_ranks_that_have_saved_do_not_wait_for_ever_for_one_that_hangs(tmp_path: Path, code: int) -> None:
    began = time.monotonic()
    with pytest.raises(DsjobError):
        run(tmp_path, f"time.sleep(600) if rank == '1' else sys.exit({code})")
    assert time.monotonic() - began < 300


@pytest.mark.usefixtures("quick")
def test_a_process_that_cannot_be_ended_hides_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in state D, which waits for a device or a file system."""
    plain = supervisor.start_process

    class Held:
        def __init__(self, process: Any) -> None:
            self.pid, self.poll = process.pid, process.poll

        def wait(self, seconds: float) -> None:
            raise subprocess.TimeoutExpired("rank", seconds)

    monkeypatch.setattr(supervisor, "start_process", lambda *arguments: Held(plain(*arguments)))
    with pytest.raises(LaunchError, match="rank 0 exited with code 7 before the last step"):
        run(tmp_path, "time.sleep(600) if rank == '1' else sys.exit(7)")


@pytest.fixture(params=[signal.SIGHUP, signal.SIGINT])
def ignored(request: pytest.FixtureRequest) -> Iterator[int]:
    before = signal.signal(request.param, signal.SIG_IGN)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path, ignored: int) -> None:
    """As under nohup, or in the background of a shell."""
    assert list_heeded([signal.SIGTERM, ignored]) == [signal.SIGTERM]
    send = f"os.kill({os.getpid()}, {int(ignored)})"
    done = f"open(r'{tmp_path}/private/done-0000' + rank, 'w')"
    run(tmp_path, f"{send}; {done}")
    assert signal.getsignal(ignored) == signal.SIG_IGN
