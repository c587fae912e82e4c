"""How a program finds its other ranks: given, by the environment, by what MPI says, or alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from programs import Program

from dsjob.errors import LaunchError
from dsjob.ranks.mpi import discover_mpi
from dsjob.ranks.rendezvous import read_timeout

PROGRAM = """
import torch, dsjob, torch.distributed as dist
{call}
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), int(total))
"""


def run(folder: Path, call: str, environments: list[dict[str, str]]) -> list[str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    processes = [
        Program(
            [sys.executable, "-c", PROGRAM.format(call=call)],
            cwd=folder,
            env={**plain, "GLOO_SOCKET_IFNAME": "lo", **environment},
        )
        for environment in environments
    ]
    return [process.communicate()[0].strip() for process in processes]


@pytest.mark.slow
def test_nothing_set_is_a_group_of_one(tmp_path: Path) -> None:
    assert run(tmp_path, "dsjob.init_distributed()", [{}]) == ["0 1 1"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")])
def test_mpi_tells_rank_and_size(tmp_path: Path, words: tuple[str, str], unused_port: int) -> None:
    environments = [{words[0]: str(rank), words[1]: "2", "MASTER_PORT": str(unused_port)} for rank in range(2)]
    assert run(tmp_path, "dsjob.init_distributed()", environments) == ["0 2 3", "1 2 3"]


@pytest.mark.slow
def test_a_rendezvous_is_given(tmp_path: Path) -> None:
    calls = f'init_method="file://{tmp_path}/store", world_size=2, dist_backend="gloo"'
    environments = [{"NUMBER": str(rank)} for rank in range(2)]
    call = f'import os; dsjob.init_distributed({calls}, rank=int(os.environ["NUMBER"]))'
    assert run(tmp_path, call, environments) == ["0 2 3", "1 2 3"]


def test_ranks_on_several_machines_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "9", "SIZE": "16", "LOCAL_RANK": "1", "LOCAL_SIZE": "8"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(LaunchError, match="MPI has started 16 ranks, 8 of them here, but MASTER_ADDR is not set"):
        discover_mpi()


def test_the_timeout_is_in_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_timeout() == 1800
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "0.5")
    assert read_timeout() == 30


@pytest.mark.parametrize("given", ["long", "", "0", "-1", "inf", "nan"])
def test_a_timeout_that_is_no_number_of_minutes_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", given)
    with pytest.raises(LaunchError, match=f"DEEPSPEED_TIMEOUT={given} is not a number of minutes"):
        read_timeout()
