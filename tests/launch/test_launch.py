"""Ranks as the launcher starts, joins, stops and outlives them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import dsjob, list_commits, make_job, read_metrics
from programs import DSJOB, Program, clean_env, find_processes, run_program
from sockets import LOOPBACK, list_listening

pytestmark = pytest.mark.slow


def wait_until(condition: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


class Started:
    """A job that runs on while the test does something to it."""

    def __init__(self, folder: Path, *arguments: str, command: Sequence[str] = ()) -> None:
        self.folder, self.run = folder, folder / "run"
        command = [*command, DSJOB, "cfg.json", *arguments]
        self.process = Program(command, cwd=folder)

    def wait_until_gone(self) -> None:
        wait_until(lambda: not find_processes(self.folder), 10)

    def wait_for_step(self, step: int) -> None:
        file = self.run / "metrics.jsonl"
        reached = lambda: file.exists() and f'"step": {step},' in file.read_text()  # noqa: E731
        wait_until(lambda: reached() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["launch.nproc=2", "zero_optimization.stage=3"],
        pytest.param(["launch.nproc=4"], marks=pytest.mark.full),
        pytest.param(
            ["launch.nproc=2", "zero_optimization.stage=1", "bf16.enabled=true", "trainer.micro_batch=2"],
            marks=pytest.mark.full,
        ),
    ],
    ids=["one rank", "two ranks, stage 3", "four ranks, stage 0", "two ranks, stage 1, bf16, accumulated"],
)
@pytest.mark.full("one rank")
def test_after_kill_9_the_run_goes_on_bit_for_bit(tmp_path: Path, arguments: list[str]) -> None:
    options = [
        *("trainer.max_steps=20", "trainer.eval_every=7", "checkpoint.every=6", "+model.dropout=0.3"),
        *("+scheduler.type=WarmupLR", "scheduler.params.warmup_num_steps=10", *arguments),
    ]
    make_job(tmp_path)
    assert dsjob("cfg.json", *options, "output.dir=whole", cwd=tmp_path).returncode == 0
    started = Started(tmp_path, *options, "+data.train.pause=0.01")
    started.wait_for_step(9)
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait(10)
    started.wait_until_gone()
    assert list_commits(started.run) == ["step-00000006"]
    done = dsjob("cfg.json", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "at step 6" in done.stdout
    for key in ("loss", "grad_norm", "lr", "eval/loss"):
        assert read_metrics(started.run, key) == read_metrics(tmp_path / "whole", key)
    assert read_digests(started.run) == read_digests(tmp_path / "whole")


def read_digests(run: Path) -> dict[str, list[str]]:
    """The sha256 of every chunk of the newest checkpoint."""
    record = json.loads((run / "checkpoints" / "commits" / f"{list_commits(run)[-1]}.json").read_text())
    manifest = json.loads((run / "checkpoints" / record["dir"] / "manifest.json").read_text())
    return {name: [chunk["sha256"] for chunk in tensor["chunks"]] for name, tensor in manifest["tensors"].items()}


@pytest.mark.parametrize("arguments", [["+data.num_workers=1"], ["launch.nproc=2"]], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.full("2-130-one rank", "15-75-one rank")
def test_a_signal_saves_and_stops_everything(tmp_path: Path, arguments: list[str], number: int, code: int) -> None:
    make_job(tmp_path, trainer={"train_batch": 8, "max_steps": 100000, "log_every": 1})
    started = Started(tmp_path, *arguments, "+data.train.pause=0.01")
    started.wait_for_step(5)
    if number == signal.SIGINT:
        os.killpg(started.process.pid, number)  # as a terminal does: loader workers get it too
    else:
        os.kill(started.process.pid, number)
    output, errors = started.process.communicate(timeout=60)
    assert started.process.returncode == code, errors
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert (told := re.search(rf"dsjob: stopped by {name} after step (\d+); saved ", errors)), errors
    assert list_commits(started.run) == [f"step-{int(told[1]):08d}"]
    assert f"the newest checkpoint is step-{int(told[1]):08d}; to resume: dsjob run run" in errors
    assert errors.count("resume") == 1
    assert errors.count("press it again to stop at once") == (number == signal.SIGINT)
    assert "Traceback" not in errors + output
    assert "error" not in errors
    started.wait_until_gone()


def test_workers_that_load_data_outlive_a_signal_to_all_processes(tmp_path: Path) -> None:
    make_job(tmp_path, trainer={"train_batch": 8, "max_steps": 100000, "log_every": 1})
    started = Started(tmp_path, "launch.nproc=1", "+data.train.pause=0.01", "data.num_workers=2")
    started.wait_for_step(5)
    os.killpg(started.process.pid, signal.SIGTERM)  # as Slurm does, and torchrun
    _, errors = started.process.communicate(timeout=60)
    assert started.process.returncode == 75, errors
    assert "dsjob: stopped by SIGTERM after step " in errors
    started.wait_until_gone()


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, nproc: int) -> None:
    """The step that the first one waits for never ends."""
    make_job(tmp_path, trainer={"train_batch": 8, "max_steps": 100000, "log_every": 1})
    (tmp_path / "stuck.py").write_text(STUCK)
    started = Started(tmp_path, f"launch.nproc={nproc}", "checkpoint.every=2", "model._target_=stuck.Stuck")
    wait_until(lambda: (tmp_path / "stuck").exists() or started.process.poll() is not None)
    os.killpg(started.process.pid, signal.SIGINT)
    wait_until(lambda: "press it again" in started.process.stderr or started.process.poll() is not None)
    assert started.process.poll() is None, started.process.stderr
    os.killpg(started.process.pid, signal.SIGINT)
    started.process.wait(timeout=60)
    errors = started.process.stderr
    assert started.process.returncode == 130, errors
    assert "the newest checkpoint is step-00000002; to resume: dsjob run run" in errors
    assert "dsjob: interrupted" in errors
    assert "Traceback" not in errors
    started.wait_until_gone()


STUCK = """
import pathlib, time
from my_model import Net

class Stuck(Net):
    calls = 0

    def forward(self, x, y):
        Stuck.calls += self.training
        if Stuck.calls == 4:
            pathlib.Path("stuck").touch()
            while True:
                time.sleep(0.1)
        return super().forward(x, y)
"""


def test_ctrl_c_before_training_stops_at_once(tmp_path: Path) -> None:
    make_job(tmp_path)
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('slow').touch()\nwhile True: time.sleep(0.1)\n"
    )
    started = Started(tmp_path, "launch.nproc=2", "model._target_=slow.Net")
    wait_until((tmp_path / "slow").exists)
    os.killpg(started.process.pid, signal.SIGINT)
    _, errors = started.process.communicate(timeout=60)
    assert started.process.returncode == 130, errors
    assert "dsjob: interrupted\n" in errors
    assert "saved" not in errors
    assert not (tmp_path / "run").exists()
    started.wait_until_gone()


def test_ctrl_c_saves_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        make_job(folder, trainer={"train_batch": 8, "max_steps": 100000, "log_every": 1})
        started = Started(folder, "+data.train.pause=0.01", command=command)
        started.wait_for_step(3)
        os.killpg(started.process.pid, signal.SIGINT)
        _, errors = started.process.communicate(timeout=60)
        assert started.process.returncode != 0
        if "UnboundLocalError" not in errors:  # torch's agent fails where the signal meets its own timing of itself
            break
    assert "dsjob: stopped by Ctrl-C after step" in errors
    assert len(list_commits(started.run)) == 1
    started.wait_until_gone()


def test_a_signal_to_the_launcher_saves_and_training_goes_on(tmp_path: Path) -> None:
    make_job(tmp_path, trainer={"train_batch": 8, "max_steps": 100000, "log_every": 1})
    started = Started(tmp_path, "launch.nproc=2", "+data.train.pause=0.01")
    started.wait_for_step(3)
    os.kill(started.process.pid, signal.SIGUSR1)
    wait_until(lambda: list_commits(started.run))
    assert started.process.poll() is None
    os.kill(started.process.pid, signal.SIGTERM)
    _, errors = started.process.communicate(timeout=60)
    assert started.process.returncode == 75, errors
    assert len(list_commits(started.run)) == 2


@pytest.mark.full("True")
@pytest.mark.parametrize("fresh", [False, True])
def test_the_first_failing_rank_is_shown_and_nothing_else(tmp_path: Path, fresh: bool) -> None:
    make_job(tmp_path)
    crash = ("trainer.train_batch=6", "model._target_=my_model.CrashOnRank1")
    done = dsjob("cfg.json", "launch.nproc=2", *crash, cwd=tmp_path, fresh=fresh)
    assert done.returncode == 1
    assert done.stderr.startswith("dsjob: error: rank 1: ValueError: rank 1 has had enough (")
    assert "my_model.py:" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_a_rank_whose_launcher_was_gone_before_it_could_ask_to_be_told_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "dsjob.launch.rank", "resolved.json", "run"]
    env = clean_env(DSJOB_LAUNCHER=str(os.getppid()))  # the launcher's parent is the rank's once it is gone
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    make_job(tmp_path, trainer={"train_batch": 8, "max_steps": 100000, "log_every": 1})
    started = Started(tmp_path, "launch.nproc=2", "+data.train.pause=0.01")
    started.wait_for_step(3)
    os.kill(started.process.ranks[1], signal.SIGKILL)
    _, errors = started.process.communicate(timeout=30)
    assert started.process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in errors
    started.wait_until_gone()


def test_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    make_job(tmp_path, trainer={"train_batch": 8, "max_steps": 100000, "log_every": 1})
    started = Started(tmp_path, "launch.nproc=2", "+data.train.pause=0.01")
    try:
        started.wait_for_step(2)
        assert list_listening(find_processes(tmp_path)) <= LOOPBACK
    finally:
        os.killpg(started.process.pid, signal.SIGKILL)
        started.process.communicate()


def test_ranks_of_torchrun_are_joined(tmp_path: Path) -> None:
    make_job(tmp_path)
    assert dsjob("cfg.json", "launch.nproc=2", "output.dir=own", cwd=tmp_path).returncode == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB, "cfg.json"]
    done = run_program(torchrun, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cpu, 2 ranks" in done.stdout
    assert done.stdout.count("my_model.build") == 1
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "own")


def test_tasks_of_srun_are_joined(tmp_path: Path) -> None:
    make_job(tmp_path)
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    tasks = [
        Program(
            [DSJOB, "cfg.json"],
            cwd=tmp_path,
            env=clean_env(**common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
        )
        for rank in range(2)
    ]
    outputs = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert "cpu, 2 ranks" in outputs[0][0]
    assert outputs[1][0] == ""
    assert list_commits(tmp_path / "run") == ["step-00000006"]


def test_a_mistake_in_the_document_stops_every_joined_rank(tmp_path: Path) -> None:
    make_job(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB, "cfg.json"]
    done = run_program([*torchrun, "trainer.train_batch=7"], cwd=tmp_path)
    assert done.returncode != 0
    assert "does not divide evenly among 2 data-parallel ranks (ranks that were started)" in done.stderr


def test_ranks_of_torchrun_do_not_resume_another_job(tmp_path: Path) -> None:
    make_job(tmp_path)
    assert dsjob("cfg.json", cwd=tmp_path).returncode == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB, "cfg.json"]
    done = run_program([*torchrun, "model._target_=my_model.NoLoss"], cwd=tmp_path)
    assert "error[another-job]: output.dir: run holds the run of another job" in done.stderr
    assert "does not match the model" not in done.stderr
    done = dsjob("cfg.json", "model._target_=my_model.biuld", cwd=tmp_path)
    assert "error[not-found]: model._target_: cannot import my_model.biuld" in done.stderr
    assert "error[another-job]" in done.stderr


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.full("1")
def test_a_damaged_checkpoint_reads_the_same_on_any_number_of_ranks(tmp_path: Path, nproc: int) -> None:
    make_job(tmp_path, trainer={"train_batch": 8, "max_steps": 2})
    assert dsjob("cfg.json", cwd=tmp_path).returncode == 0
    (shard,) = (tmp_path / "run/checkpoints").rglob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:200])
    done = dsjob("run", "run", "trainer.max_steps=4", f"launch.nproc={nproc}", cwd=tmp_path)
    assert done.returncode == 1
    assert re.sub(r"manifest says \d+", "manifest says N", done.stderr) == (
        f"dsjob: error: {shard.relative_to(tmp_path)} has 200 bytes; the manifest says N\n"
        "  restore it from a copy, or start over in another output.dir\n"
    )
