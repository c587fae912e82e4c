"""Which device a rank takes, and what Slurm says of the ranks on a machine."""

import pytest
import torch

from dsjob import mesh
from dsjob.errors import LaunchError
from dsjob.launch import read_world_size


@pytest.mark.parametrize(
    ("wanted", "gpus", "local_rank", "local_world_size", "slurm", "expected"),
    [
        ("auto", 0, 0, 1, False, "cpu"),
        ("auto", 0, 1, 2, False, "cpu"),
        ("auto", 8, 3, 8, False, "cuda:3"),
        ("auto", 8, 3, 4, False, "cuda:3"),
        ("cuda", 2, 1, 2, False, "cuda:1"),
        ("cpu", 8, 3, 8, False, "cpu"),
        ("auto", 1, 3, 4, True, "cuda:0"),
        ("cuda", 1, 3, 4, True, "cuda:0"),
        ("auto", 1, 0, 2, False, None),
        ("cuda", 0, 0, 1, False, None),
        ("cuda", 4, 7, 8, False, None),
    ],
)
def test_each_rank_has_a_gpu_or_is_told(
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    gpus: int,
    local_rank: int,
    local_world_size: int,
    slurm: bool,
    expected: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    if expected is None:
        with pytest.raises(LaunchError, match="each rank needs a GPU of its own"):
            mesh._choose_device(wanted, local_rank, local_world_size)
    else:
        assert mesh._choose_device(wanted, local_rank, local_world_size) == torch.device(expected)


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
