"""torchrun starts ranks anew: they meet, in the folder they had, and go on from its newest checkpoint."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from jobs import dsjob, make_job, read_metrics
from programs import DSJOB, Program, clean_env

pytestmark = pytest.mark.slow

MODULE = """
import os, signal
from dsjob.callbacks.callback import Callback
from my_model import Net as Plain

# One kill for each start: `rank:call`. A file for each that was carried out.
KILLS = [kill for kill in os.environ.get("TEST_KILLS", "").split(",") if kill]
DONE = [name for name in os.listdir(".") if name.startswith("killed-")]

class Net(Plain):
    calls = 0

    def forward(self, x, y):
        Net.calls += 1
        if len(DONE) < len(KILLS) and KILLS[len(DONE)] == f"{os.environ['RANK']}:{Net.calls}":
            open(f"killed-{len(DONE)}", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x, y)

class Starts(Callback):
    def on_start(self, run):
        if run.engine.global_rank == 0:
            (folder,) = os.listdir("outputs/cfg")
            commits = f"outputs/cfg/{folder}/checkpoints/commits"
            names = sorted(os.listdir(commits)) if os.path.isdir(commits) else ["step-0.json"]
            with open("starts", "a") as file:
                file.write(f"{run.step} {int(names[-1].removesuffix('.json').partition('-')[2])}\\n")
"""
STEPS = 14


def make(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    make_job(
        folder,
        model={"_target_": "killed_net.Net", "dropout": 0.3},
        callbacks={"starts": {"_target_": "killed_net.Starts"}},
        data={"train": {"_target_": "my_model.Data"}},
        trainer={"train_batch": 8, "max_steps": STEPS, "log_every": 1},
        checkpoint={"every": 2},
        output={"dir": "outputs/%name/%time"},
    )
    (folder / "killed_net.py").write_text(MODULE)
    return folder


def torchrun(
    agents: int, *arguments: str, port: int, folders: list[Path], restarts: int = 3, **env: str
) -> list[tuple[int, str]]:
    """Two ranks, under one agent or two; each agent's exit code and output."""
    each = [
        f"--nproc-per-node={2 // agents}",
        f"--max-restarts={restarts}",
        "--no-python",
        DSJOB,
        "cfg.json",
        *arguments,
    ]
    if agents > 1:
        where = f"--rdzv-endpoint=127.0.0.1:{port}"
        each = [f"--nnodes={agents}", "--rdzv-backend=c10d", where, "--rdzv-id=7", "--local-addr=127.0.0.1", *each]
    else:
        each = [f"--master-port={port}", *each]
    running = [
        Program(
            [sys.executable, "-m", "torch.distributed.run", *each],
            cwd=folder,
            env=clean_env(GLOO_SOCKET_IFNAME="lo", **env),
            merged=True,
        )
        for folder in folders
    ]
    outputs = [process.communicate(300)[0] for process in running]
    return [(process.wait(0), output) for process, output in zip(running, outputs, strict=True)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = make(tmp_path_factory.mktemp("whole"))
    done = dsjob("cfg.json", "launch.nproc=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "outputs" / "cfg").iterdir()
    return read_metrics(run)


def draw_kills(seed: int) -> list[str]:
    """At most one for each of torchrun's restarts, of any rank at any of its first steps."""
    drawn = random.Random(seed)
    return [f"{drawn.randrange(2)}:{drawn.randint(1, 5)}" for _ in range(drawn.randint(1, 3))]


CASES = [(1, ["0:4", "1:3"]), (2, ["1:4", "0:4"])]
TWENTY = [(agents, draw_kills(seed)) for seed in range(10) for agents in (1, 2)]


@pytest.mark.parametrize(
    ("agents", "kills"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in TWENTY)]
)
@pytest.mark.full("1-kills0")
def test_ranks_that_are_started_anew_resume_from_the_newest_checkpoint(
    tmp_path: Path, unused_port: int, unbroken: dict[int, float], agents: int, kills: list[str]
) -> None:
    folder = make(tmp_path)
    ends = torchrun(agents, port=unused_port, folders=[folder] * agents, TEST_KILLS=",".join(kills))
    assert [code for code, _ in ends] == [0] * agents, ends
    assert len(list(folder.glob("killed-*"))) == len(kills)
    (run,) = (folder / "outputs" / "cfg").iterdir()
    starts = [line.split() for line in (folder / "starts").read_text().splitlines()]
    assert len(starts) == 1 + len(kills)
    assert [step for step, _ in starts] == [newest for _, newest in starts]
    assert read_metrics(run) == unbroken


@pytest.mark.full
def test_nodes_without_shared_storage_are_told_apart_before_the_first_step(tmp_path: Path, unused_port: int) -> None:
    folders = [make(tmp_path / name) for name in ("one", "two")]
    ends = torchrun(2, "checkpoint.dir=saved", port=unused_port, folders=folders, restarts=0)
    assert all(code != 0 for code, _ in ends)
    for _, output in ends:
        assert "does not see what rank 0 writes to" in output
        assert "set checkpoint.dir to a folder on storage that all nodes mount" in output
    assert not any((folder / "starts").exists() for folder in folders)
    assert not list(tmp_path.rglob(".seen-by-all-*"))
