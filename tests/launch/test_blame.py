"""The rank that is named is the one that failed, with its cause; the others end with it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jobs import dsjob, make_job
from killed import Killable, wait_until
from programs import DSJOB, clean_env, find_processes, run_program

from dsjob.launch.launcher import telling_what_is_kept
from dsjob.run_folder import METRICS_NAME

pytestmark = pytest.mark.slow

MODULE = """
import ctypes, os, signal, sys, time
import torch.distributed as dist
from my_model import Net as Plain

def raise_(error):
    raise error

def die(number):
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

def abort():
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n")
    os.abort()

def sleep():
    time.sleep(10_000)

ENDS = {
    "_exit 0": lambda: ctypes.CDLL(None)._exit(0),
    "_exit 7": lambda: ctypes.CDLL(None)._exit(7),
    "os._exit": lambda: os._exit(0),
    "SystemExit": lambda: sys.exit(0),
    "KeyboardInterrupt": lambda: raise_(KeyboardInterrupt()),
    "ConnectionError": lambda: raise_(ConnectionResetError("Connection reset by peer: the data server")),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGABRT": abort,
    "SIGSEGV": lambda: ctypes.string_at(0),
    "sleep": sleep,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "collective": lambda: dist.barrier(),
}

class Net(Plain):
    calls = 0

    def __init__(self, rank, end):
        super().__init__()
        self.rank, self.end = rank, end

    def forward(self, x, y):
        Net.calls += 1
        if Net.calls == 3 and dist.get_rank() == self.rank:
            ENDS[self.end]()
        return super().forward(x, y)
"""


def start(folder: Path, rank: int, end: str, *arguments: str) -> Killable:
    """Starts the job whose `rank` ends, or stops, in its third step."""
    model = {"_target_": "failing_net.Net", "rank": rank, "end": end}
    trainer = {"train_batch": 12, "max_steps": 20, "log_every": 1}
    make_job(folder, model=model, trainer=trainer, data={"train": {"_target_": "my_model.Data"}})
    (folder / "failing_net.py").write_text(MODULE)
    return Killable("cfg.json", *arguments, cwd=folder)


@pytest.mark.parametrize(
    ("end", "rank", "said"),
    [
        ("_exit 0", 1, "exited with code 0 before the last step without reporting an error (os._exit in user code?)"),
        pytest.param("_exit 7", 0, "exited with code 7 before the last step", marks=pytest.mark.full),
        ("os._exit", 1, "user code called os._exit(0) before the last step ({file}:"),
        ("SystemExit", 1, "user code called sys.exit(0) before the last step ({file}:"),
        ("KeyboardInterrupt", 0, "KeyboardInterrupt ({file}:"),
        ("ConnectionError", 1, "ConnectionResetError: Connection reset by peer: the data server ({file}:"),
        pytest.param("SIGKILL", 0, "was killed by SIGKILL (the system", marks=pytest.mark.full),
        ("SIGKILL", 1, "was killed by SIGKILL (the system may have run out of memory)"),
        ("SIGABRT", 0, "was killed by SIGABRT at {file}:"),
        pytest.param("SIGABRT", 1, "was killed by SIGABRT at {file}:", marks=pytest.mark.full),
        ("SIGSEGV", 1, "was killed by SIGSEGV"),
    ],
)
def test_the_rank_that_fails_is_named(tmp_path: Path, rank: int, end: str, said: str) -> None:
    workers = ["data.num_workers=1"] if end == "SIGKILL" else []
    with start(tmp_path, rank, end, "launch.nproc=2", "trainer.train_batch=8", *workers) as job:
        code, errors = job.wait(), job.errors
    assert code == 1, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("dsjob: error:")]
    said = said.format(file=tmp_path / "failing_net.py")
    assert line.startswith(f"dsjob: error: rank {rank}{'' if said.startswith(('was', 'exited')) else ':'} {said}"), line
    if end == "SIGABRT":
        assert "terminate called after throwing an instance of 'std::bad_alloc'" in errors
    if end == "SIGSEGV":
        assert f"{tmp_path}/failing_net.py:" in errors


STALLS = [
    (1, "sleep", "rank 1 has stalled in step 3 (training), at {file}:"),
    (0, "sleep", "rank 0 has stalled in step 3 (training), at {file}:"),
    (1, "SIGSTOP", "rank 1 was stopped by a signal: its process is in state T; it was last seen in step "),
    (2, "collective", "ranks wait for each other in different collectives: rank 2 at {file}:"),
]


@pytest.fixture(scope="module", autouse=True)  # before the first test: they wait for most of their time
def stalling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, str], tuple[Killable, Path]]]:
    """Jobs that stall, all at once."""
    with ExitStack() as running:
        jobs = {}
        for rank, end, _ in STALLS:
            folder = tmp_path_factory.mktemp("stalling")
            jobs[rank, end] = (
                running.enter_context(start(folder, rank, end, "launch.nproc=3", "launch.timeout=3")),
                folder,
            )
        yield jobs


@pytest.mark.parametrize(("rank", "end", "said"), STALLS)
def test_a_rank_that_the_others_wait_for_is_named_with_its_stack(
    stalling: dict[tuple[int, str], tuple[Killable, Path]], rank: int, end: str, said: str
) -> None:
    job, folder = stalling[rank, end]
    assert job.wait() == 1, job.errors
    assert f"dsjob: error: {said.format(file=folder / 'failing_net.py')}" in job.errors
    assert "SIGCONT" not in job.errors
    if end == "sleep":
        assert f"stack of rank {rank}, innermost first:" in job.errors
        assert "in forward" in job.errors
        assert (folder / "run" / "logs" / f"stacks-{rank:05d}.txt").exists()


def test_workers_that_load_data_end_with_their_rank(tmp_path: Path) -> None:
    make_job(tmp_path)
    options = ["launch.nproc=2", "data.num_workers=2", "model._target_=my_model.CrashOnRank1"]
    done = dsjob("cfg.json", *options, cwd=tmp_path)
    assert "rank 1: ValueError: rank 1 has had enough" in done.stderr
    assert find_processes(tmp_path) == []


@pytest.mark.parametrize(
    ("end", "own", "other"),
    [
        (
            "SystemExit",
            "rank 1: user code called sys.exit(0) before the last step ({file}:",
            "another rank",
        ),
        pytest.param(
            "SystemExit of new interpreters",
            "rank 1: user code called sys.exit(0) before the last step ({file}:",
            "another rank",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "sleep",
            "rank 0 timed out waiting for another rank: rank 1 has stalled in step 3 (training), at {file}:",
            "stack of rank 1",
            marks=pytest.mark.full,
        ),
        (
            "SIGKILL",
            "rank 0 has lost another rank: its connection was closed\n",
            "if it has none, that rank was killed",
        ),
    ],
)
def test_ranks_of_torchrun_tell_their_own_cause(tmp_path: Path, end: str, own: str, other: str) -> None:
    end, _, new = end.partition(" of ")
    model = {"_target_": "failing_net.Net", "rank": 1, "end": end}
    make_job(tmp_path, model=model, data={"train": {"_target_": "my_model.Data"}}, launch={"timeout": 5})
    (tmp_path / "failing_net.py").write_text(MODULE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB, "cfg.json"]
    if new:  # torch reads how quiet it has to be when it is imported
        env = clean_env()
        done = subprocess.run(torchrun, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=120, check=False)
        assert "find_unused_parameters" not in done.stderr
    else:
        done = run_program(torchrun, cwd=tmp_path)
    assert done.returncode != 0
    assert f"dsjob: error: {own.format(file=tmp_path / 'failing_net.py')}" in done.stderr
    assert other in done.stderr
    assert done.stderr.count("dsjob: error: rank 1: ") == (end == "SystemExit")


SLEEPING = """
import pathlib, time
from my_model import Net as Plain

class Net(Plain):
    calls = 0

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, x, y):
        import os
        Net.calls += self.training
        if Net.calls == 4 and os.environ.get("RANK", "0") == str(self.rank):
            pathlib.Path("asleep").touch()
            while True:
                time.sleep(0.1)
        return super().forward(x, y)
"""


DEAF = list(itertools.product((False, True), ((1, 0), (2, 0), (2, 1))))


@pytest.fixture(scope="module")
def deaf(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Any, tuple[Killable, Path]]]:
    """Jobs of the selected tests, all at once, that SIGTERM finds in a sleep."""
    test = test_a_rank_that_does_not_answer_sigterm_is_ended_and_named
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.function is test]
    with ExitStack() as running:
        jobs = {}
        for saves, (nproc, rank) in ((item.callspec.params["saves"], item.callspec.params["ranks"]) for item in items):
            folder = tmp_path_factory.mktemp("deaf")
            data = {"train": {"_target_": "my_model.Data"}}
            make_job(folder, model={"_target_": "sleeping.Net", "rank": rank}, data=data)
            (folder / "sleeping.py").write_text(SLEEPING)
            options = [f"launch.nproc={nproc}", "launch.grace=1", *(["checkpoint.every=2"] if saves else [])]
            jobs[saves, (nproc, rank)] = running.enter_context(Killable("cfg.json", *options, cwd=folder)), folder
        for job, folder in jobs.values():
            wait_until((folder / "asleep").exists, 60, "it never gets to sleep")
            os.kill(job.pid, signal.SIGTERM)
        yield jobs


@pytest.mark.parametrize(("saves", "ranks"), DEAF)
@pytest.mark.full("False-ranks0", "True-ranks3", "True-ranks5", "False-ranks1")
def test_a_rank_that_does_not_answer_sigterm_is_ended_and_named(
    deaf: dict[Any, tuple[Killable, Path]], saves: bool, ranks: tuple[int, int]
) -> None:
    (nproc, rank), (job, folder) = ranks, deaf[saves, ranks]
    code, errors = job.wait(), job.errors
    assert code == 143, errors
    place = f"at {folder}/sleeping.py:"
    who = f"rank {rank} has stalled in step 4 (training)," if nproc > 1 else "step 4 (training) is"
    assert f"dsjob: error: stopped by SIGTERM, then no progress for 1 s: {who} {place}" in errors
    kept = (
        "the newest checkpoint is step-00000002; to resume: dsjob run run"
        if saves
        else ("nothing was saved in run; set checkpoint.every=N to save every N steps")
    )
    assert errors.count(f"dsjob: {kept}\n") == 1, errors
    assert "Traceback" not in errors


ABORTING = """
import os
from my_model import Net as Plain

class Net(Plain):
    def forward(self, x, y):
        os.abort()
"""


def test_a_run_of_one_process_that_aborts_shows_where(tmp_path: Path) -> None:
    make_job(tmp_path, model={"_target_": "aborting.Net"})
    (tmp_path / "aborting.py").write_text(ABORTING)
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == -6
    assert "Fatal Python error: Aborted" in done.stderr
    assert f'File "{tmp_path}/aborting.py", line 7 in forward' in done.stderr


LATE = """
import dsjob
from my_model import Net as Plain

class Net(Plain):
    calls = 0

    def forward(self, x, y):
        Net.calls += 1
        if Net.calls == 3:
            raise ValueError("the key is SECRET-VALUE")
        return super().forward(x, y)

class Tracker(dsjob.Callback):
    def __init__(self, key):
        pass
"""


@pytest.mark.parametrize(("starts", "log_every"), [("one rank", 1), ("one rank", 9), ("two ranks", 1), ("torchrun", 1)])
def test_a_failure_after_the_first_step_leaves_its_traceback_and_result(
    tmp_path: Path, starts: str, log_every: int
) -> None:
    make_job(
        tmp_path,
        model={"_target_": "late.Net"},
        trainer={"train_batch": 8, "max_steps": 6, "log_every": log_every},
        data={"train": {"_target_": "my_model.Data"}},
        callbacks={"tracker": {"_target_": "late.Tracker", "key": "${oc.env:LATE_KEY}"}},
        output={"dir": "outputs/%name/%time"},
    )
    (tmp_path / "late.py").write_text(LATE)
    words = [DSJOB, "cfg.json", *(["launch.nproc=2"] if starts == "two ranks" else [])]
    if starts == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB]
    done = run_program(words, cwd=tmp_path, env=clean_env(LATE_KEY="SECRET-VALUE"))
    (folder,) = (tmp_path / "outputs/cfg").iterdir()
    told = re.search(r"^  the traceback is in (outputs/cfg/.*/logs/traceback-(\d{5}).txt)$", done.stderr, re.MULTILINE)
    assert told, done.stderr
    kept, rank = (tmp_path / told[1]).read_text(), int(told[2])
    assert "run again with --debug" not in done.stderr
    assert f"rank {rank}, after step 2\nTraceback (most recent call last):" in kept
    assert kept.endswith("ValueError: the key is ***\n")
    if log_every == 1 and starts != "torchrun":  # which may end rank 0 before it has written anything
        assert "nothing was saved in" in done.stderr
        assert "; set checkpoint.every=N to save every N steps" in done.stderr
        result = json.loads((folder / "result.json").read_text())
        assert (result["status"], result["exit_code"]) == ("failed", 1)
        assert "ValueError: the key is ***" in result["error"]


@pytest.mark.parametrize(
    ("section", "told"), [({}, "set checkpoint.every=N to save every N steps"), ({"every": 9}, "checkpoint.every is 9")]
)
def test_what_was_not_saved_comes_with_the_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: dict[str, Any], told: str
) -> None:
    def train() -> None:
        with telling_what_is_kept(str(tmp_path), {"checkpoint": section}):
            (tmp_path / METRICS_NAME).write_text("{}\n")
            raise ValueError("the data are wrong")

    with pytest.raises(ValueError, match="the data are wrong"):
        train()
    assert f"nothing was saved in {tmp_path}; {told}\n" in capsys.readouterr().err
