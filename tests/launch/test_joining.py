"""`launch.init_distributed`: a function of the user's own joins the ranks in place of dsjob."""

import sys
from pathlib import Path

import pytest
from jobs import dsjob, make_job
from programs import DSJOB, run_program

CODE = """
import torch.distributed as dist

def connect(backend, store, rank, world_size, port=None):
    print(f"rank {rank} of {world_size} by itself")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

def forget():
    pass

def fail(backend):
    raise OSError(f"no network for {backend}")
"""


def make(folder: Path, function: str) -> None:
    target = {"_target_": f"joins.{function}"}
    make_job(folder, trainer={"train_batch": 8, "max_steps": 2}, launch={"nproc": 2, "init_distributed": target})
    (folder / "joins.py").write_text(CODE)


def test_ranks_of_dsjob_and_of_torchrun_are_joined_by_it(tmp_path: Path) -> None:
    make(tmp_path, "connect")
    assert dsjob("validate", "--deep", "cfg.json", cwd=tmp_path).stdout == "cfg.json: ok\n"
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 by itself" in (tmp_path / "run" / "logs" / "rank-00001.log").read_text()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", DSJOB]
    done = run_program([*command, "cfg.json", "output.dir=joined"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 by itself" in done.stdout


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("forget", "launch.init_distributed: rank 0 of 2 is without a process group"),
        ("fail", "launch.init_distributed: OSError: no network for gloo"),
        ("fial", "cannot import joins.fial: joins has no 'fial'; did you mean \"fail\"?"),
    ],
)
def test_its_errors_have_their_place(tmp_path: Path, function: str, message: str) -> None:
    make(tmp_path, function)
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode
    assert "cfg.json:" in done.stderr
    assert message.replace("rank 0", "rank") in done.stderr.replace("rank 0", "rank").replace("rank 1", "rank")
