"""Which device a rank takes, and what Slurm says of the ranks on a machine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import clean_env

from dsjob.errors import LaunchError
from dsjob.home import find_again
from dsjob.launch.launcher import read_world_size
from dsjob.ranks import mesh

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_PROCID": "3"}


@pytest.mark.parametrize(
    ("wanted", "gpus", "local_rank", "local_world_size", "environment", "expected"),
    [
        ("auto", 0, 0, 1, {}, "cpu"),
        ("auto", 0, 1, 2, {}, "cpu"),
        ("auto", 8, 3, 8, {}, "cuda:3"),
        ("auto", 8, 3, 4, {}, "cuda:3"),
        ("cuda", 2, 1, 2, {}, "cuda:1"),
        ("cpu", 8, 3, 8, {}, "cpu"),
        pytest.param("auto", 8, 3, 0, {}, "cuda:3", id="a launcher that gives the local rank alone"),
        pytest.param("auto", 1, 0, 0, {}, "cuda:0", id="a PyTorchJob's pod"),
        pytest.param("auto", 1, 3, 4, SRUN, "cuda:0", id="srun --gpus-per-task=1 or --gpu-bind=single:1"),
        pytest.param("cuda", 4, 3, 4, SRUN, "cuda:3", id="srun without binding"),
        pytest.param("auto", 1, 0, 8, {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "5"}, "cuda:0", id="--virtual-local-rank"),
        ("auto", 1, 0, 2, {}, None),
        ("auto", 1, 1, 2, {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "5"}, None),
        ("auto", 1, 0, 2, {**TORCHRUN, **SRUN}, None),
        ("auto", 2, 0, 4, {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ("cuda", 0, 0, 1, {}, None),
        ("cuda", 0, 0, 0, {}, None),
        ("cuda", 4, 7, 8, {}, None),
        ("cuda", 4, 7, 0, {}, None),
        ("cuda", 2, 3, 4, SRUN, None),
    ],
)
def test_each_rank_has_a_gpu_or_is_told(
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    gpus: int,
    local_rank: int,
    local_world_size: int,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    show_gpus(monkeypatch, gpus, environment)
    if expected is None:
        with pytest.raises(LaunchError, match="each rank needs a GPU of its own"):
            mesh._choose_device(wanted, local_rank, local_world_size)
    else:
        assert mesh._choose_device(wanted, local_rank, local_world_size) == torch.device(expected)


def show_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, environment: dict[str, str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("SLURM_PROCID", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_device_that_the_program_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, 8, {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert mesh._choose_device("auto", 0, 0) == torch.device("cuda:5")
    assert mesh._choose_device("auto", 1, 8) == torch.device("cuda:5")
    assert mesh._choose_device("cpu", 1, 8) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # torch's default too, so it says nothing
    assert mesh._choose_device("auto", 1, 8) == torch.device("cuda:1")


def test_ranks_of_the_deepspeed_launcher_on_two_nodes_take_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, 8, {})
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(mesh, "_join_group", lambda *_: None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert mesh.join_world().device == torch.device("cuda:3")
    assert chosen == [torch.device("cuda:3")]


def test_two_ranks_on_one_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(
            "NCCL error: invalid usage. Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000"
        )

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setattr(mesh, "open_store", lambda *_: torch.distributed.HashStore())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("DSJOB_STORE", raising=False)
    with pytest.raises(LaunchError, match="two ranks of this machine see only the same GPU"):
        mesh._join_group(0, 2, "nccl", 10.0, torch.device("cuda:0"), None)


@pytest.mark.parametrize(
    ("tasks", "node", "expected"), [("2", 0, 2), ("8(x2)", 1, 8), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4,3", 1, 3)]
)
def test_slurm_says_how_many_ranks_share_a_machine(
    monkeypatch: pytest.MonkeyPatch, tasks: str, node: int, expected: int
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever the code sets
        monkeypatch.delenv(name)
    for name, value in {
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(node),
    }.items():
        monkeypatch.setenv(name, value)
    assert read_world_size() == 16
    assert mesh._read_int("LOCAL_WORLD_SIZE", 0) == expected


LATE = """
import time
import torch
import torch.distributed as dist
from dsjob.ranks.mesh import join_world
join_world(device="cpu").ensure_group()
work = dist.all_reduce(torch.ones(2), async_op=True)
work.get_future().then(lambda _: time.sleep(1))  # in gloo's thread
"""


@pytest.mark.full
def test_a_program_that_does_not_leave_its_group_ends_without_an_abort(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", LATE], {**clean_env(), **find_again()}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
