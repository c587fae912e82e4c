"""A value that a document reads from the environment: in nothing that reaches the terminal or the logs, whoever prints
it, in whatever way."""

from __future__ import annotations

import base64
import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from jobs import dsjob, make_job
from programs import DSJOB, clean_env, run_program

SECRET = "hunter2/token+42="
LEAK = """
import base64, ctypes, os, subprocess, sys, time, urllib.parse
from my_model import Net, Data

def leak(token, where):
    raw = token.encode()
    print(f"{where} print {token}")
    print(f"{where} stderr {token}", file=sys.stderr)
    print(f"{where} base64", base64.b64encode(b"user:" + raw).decode(), "url", urllib.parse.quote(token, safe=""))
    sys.stdout.flush()
    os.write(1, f"{where} write {token}\\n".encode())
    os.write(2, raw[:7]); time.sleep(0.1); os.write(2, raw[7:] + b"\\n")
    libc = ctypes.CDLL(None)
    libc.puts(f"{where} puts {token}".encode()); libc.fflush(None)
    subprocess.run(["sh", "-c", 'echo "$0 sh $1"; echo "$1" | base64 >&2', where, token])

class Leaky(Net):
    def __init__(self, token):
        super().__init__()
        self.token = token
        leak(token, f"rank {os.environ.get('RANK', '0')}")

class Crashing(Leaky):
    def forward(self, x, y):
        if os.environ.get("RANK", "0") == os.environ.get("CRASHES"):
            os.write(1, f"last words {self.token}\\n".encode())
            raise ValueError(f"cannot use {self.token}") if os.environ.get("KINDLY") else os.abort()
        return super().forward(x, y)

class LeakyData(Data):
    def __init__(self, token, **more):
        super().__init__(**more)
        self.token = token

    def __getitem__(self, index):
        if self.token:
            leak(self.token, "worker")
            self.token = ""
        return super().__getitem__(index)

class Talkative(Net):
    def __init__(self, token):
        super().__init__()
        # It goes on after the run, and keeps the output open.
        subprocess.Popen(["sleep", "20"], start_new_session=True)
"""
FORMS = [SECRET, quote(SECRET, safe=""), base64.b64encode(SECRET.encode()).decode().rstrip("="), "hunter2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    token = "${oc.env:DSJOB_TEST_TOKEN}"
    make_job(
        tmp_path,
        model={"_target_": "leaky.Leaky", "token": token},
        data={"train": {"_target_": "leaky.LeakyData", "token": token}, "num_workers": 1},
        trainer={"train_batch": 8, "max_steps": 2, "log_every": 1},
    )
    (tmp_path / "leaky.py").write_text(LEAK)
    return tmp_path


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return dsjob("cfg.json", *words, cwd=folder, DSJOB_TEST_TOKEN=SECRET, **env)


def check(folder: Path, *outputs: str) -> None:
    """No form of the value is in the outputs or in a file of the run."""
    texts = {f"output {number}": text for number, text in enumerate(outputs)}
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    texts |= {str(path.relative_to(folder)): path.read_text(errors="replace") for path in files}
    assert {name: form for name, text in texts.items() for form in FORMS if form in text} == {}


def list_ways(where: str) -> list[str]:
    return [f"{where} print ***", f"{where} write ***", f"{where} puts ***", f"{where} sh ***"]


@pytest.mark.parametrize(("nproc", "fresh"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.full)])
def test_no_way_of_printing_shows_a_value(folder: Path, nproc: int, fresh: bool) -> None:
    done = dsjob("cfg.json", f"launch.nproc={nproc}", cwd=folder, fresh=fresh, DSJOB_TEST_TOKEN=SECRET)
    assert done.returncode == 0, done.stderr
    check(folder, done.stdout, done.stderr)
    assert all(way in done.stdout for way in list_ways("rank 0"))
    assert "rank 0 stderr ***\n" in done.stderr
    logs = [path.read_text() for path in (folder / "run/logs").glob("rank-*.log")]
    assert len(logs) == nproc - 1
    assert all(way in log for log in logs for way in list_ways("rank 1"))
    assert any("worker write ***" in text for text in (done.stdout, *logs))
    assert re.search(r"^step 2/2", done.stdout, re.MULTILINE)


def test_ranks_of_torchrun_show_none(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB, "cfg.json"]
    done = run_program(command, cwd=folder, env=clean_env(DSJOB_TEST_TOKEN=SECRET), timeout=120)
    assert done.returncode == 0, done.stderr
    check(folder, done.stdout, done.stderr)
    assert all(way in done.stdout for rank in (0, 1) for way in list_ways(f"rank {rank}"))


@pytest.mark.parametrize("crashes", ["0", "1"])
@pytest.mark.parametrize("kindly", ["", "1"], ids=["abort", "an exception"])
def test_the_last_words_of_a_rank_show_none(folder: Path, crashes: str, kindly: str) -> None:
    words = ("model._target_=leaky.Crashing", "launch.nproc=2")
    done = run(folder, *words, CRASHES=crashes, KINDLY=kindly)
    assert done.returncode == 1
    check(folder, done.stdout, done.stderr)
    log = folder / "run/logs/rank-00001.log"  # not of a run that fails before its first step
    assert crashes == "1" or "last words ***" in done.stdout
    assert crashes == "0" or not log.exists() or "last words ***" in log.read_text()
    assert ("cannot use ***" if kindly else f"rank {crashes} was killed by SIGABRT") in done.stderr


def test_a_process_that_dies_at_once_has_shown_what_it_wrote(folder: Path) -> None:
    """A single rank, which nobody supervises, is its own process."""
    done = run(folder, "model._target_=leaky.Crashing", CRASHES="0")
    assert done.returncode != 0
    time.sleep(0.5)  # its last words are passed on after its end
    check(folder, done.stdout, done.stderr)
    assert "Fatal Python error: Aborted" in done.stderr


def test_a_child_process_that_goes_on_holds_nobody_up(folder: Path) -> None:
    begun = time.monotonic()
    done = run(folder, "model._target_=leaky.Talkative", "data.num_workers=0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^done  step 2 in", done.stdout, re.MULTILINE)
    assert time.monotonic() - begun < 20


def test_a_closed_pipe_ends_a_run_as_ever(folder: Path) -> None:
    command = f"{sys.executable} -m dsjob cfg.json data.num_workers=0 trainer.max_steps=100000 | head -1"
    env = clean_env(DSJOB_TEST_TOKEN=SECRET)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 141, done.stderr
    assert "Traceback" not in done.stderr
    check(folder, done.stdout, done.stderr)


def test_the_output_of_a_program_is_its_own_again_after_a_run(folder: Path) -> None:
    code = "import dsjob, os; dsjob.run('cfg.json'); os.write(1, b'after ' + os.environb[b'DSJOB_TEST_TOKEN'])"
    command = [sys.executable, "-c", code]
    done = run_program(command, cwd=folder, env=clean_env(DSJOB_TEST_TOKEN=SECRET), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"after {SECRET}")
    check(folder, done.stdout.removesuffix(SECRET), done.stderr)


def read_terminal(descriptor: int, until: float) -> bytes:
    found = b""
    while time.monotonic() < until and select.select([descriptor], (), (), 1)[0] is not None:
        with contextlib.suppress(BlockingIOError):
            try:
                data = os.read(descriptor, 1 << 16)
            except OSError:  # EIO: all have closed it
                return found
            found += data
    return found


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.full)])
def test_on_a_terminal_a_bar_moves_as_before(folder: Path, nproc: int) -> None:
    terminal, end = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 91, 0, 0))
    # The bar must not come between two parts of a value: they would not be recognised.
    words = [
        "cfg.json",
        f"launch.nproc={nproc}",
        "data.num_workers=0",
        "++data.train.token=null",
        "++data.train.pause=0.02",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "dsjob", *words],
        cwd=folder,
        env=clean_env(DSJOB_TEST_TOKEN=SECRET, TERM="xterm", COLUMNS=""),
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    shown = read_terminal(terminal, time.monotonic() + 90).decode()
    assert process.wait(10) == 0, shown
    check(folder, shown)
    assert "write ***\r\n" in shown  # as the terminal itself ends lines
    assert "\r\r\n" not in shown
    assert "\x1b[" in shown
    assert re.search(r"━+.* 1/2", shown)
    assert "eta " in shown
