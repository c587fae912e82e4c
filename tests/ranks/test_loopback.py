"""What ranks of one machine listen on: loopback alone, unless the address says otherwise."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from executed import execute
from jobs import dsjob, make_job
from sockets import LOOPBACK

from dsjob.ranks.loopback import create_server, is_loopback

TELL = """
import json, os, sys
sys.path.insert(0, {support!r})
from sockets import list_listening

def tell(**_):
    import torch, torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    found = sorted(list_listening(["self"]))
    with open(f"listens-{{dist.get_rank()}}.json", "w") as file:
        json.dump(found, file)
"""
PROGRAM = "import telling\ntelling.tell()\n"
DEEPSPEED = "import telling, deepspeed\ndeepspeed.init_distributed()\ntelling.tell()\n"
AGAIN = """
import telling, torch.distributed as dist
dist.init_process_group("gloo")
dist.destroy_process_group()
telling.tell()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "telling.py").write_text(TELL.format(support=str(Path(__file__).parent.parent / "support")))
    return tmp_path


def read_addresses(folder: Path) -> list[set[str]]:
    return [set(json.loads((folder / f"listens-{rank}.json").read_text())) for rank in (0, 1)]


@pytest.mark.parametrize("program", [PROGRAM, DEEPSPEED, AGAIN], ids=["torch", "deepspeed", "a second group"])
def test_the_ranks_of_a_program_listen_on_loopback_alone(folder: Path, program: str) -> None:
    (folder / "program.py").write_text(program)
    done = execute(folder, "--num_gpus", "2", "program.py")
    assert done.returncode == 0, done.stderr
    first, other = read_addresses(folder)
    assert first
    assert first | other <= LOOPBACK


def test_a_rank_in_a_new_interpreter_listens_on_loopback_alone(folder: Path) -> None:
    """There, torch is imported after dsjob has begun to wait for it."""
    (folder / "program.py").write_text(PROGRAM)
    done = dsjob("exec", "--run-dir", "run", "--num_gpus", "2", "program.py", cwd=folder, fresh=True)
    assert done.returncode == 0, done.stderr
    assert set.union(*read_addresses(folder)) <= LOOPBACK


def test_an_address_that_others_can_reach_is_listened_on(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    done = execute(folder, "--num_gpus", "2", "--master_addr", socket.gethostname(), "program.py")
    assert done.returncode == 0, done.stderr
    assert read_addresses(folder)[0] - LOOPBACK


def test_a_users_own_process_group_listens_on_loopback_alone(folder: Path) -> None:
    make_job(
        folder,
        trainer={"train_batch": 8, "max_steps": 1},
        launch={"nproc": 2, "init_distributed": {"_target_": "joining.join"}},
    )
    (folder / "joining.py").write_text(
        "import telling\n"
        "def join(rank, world_size, **_):\n"
        "    import os, torch.distributed as dist\n"
        "    os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='29733')\n"
        "    dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"
        "    telling.tell()\n"
    )
    done = dsjob("cfg.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert set.union(*read_addresses(folder)) <= LOOPBACK


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_addresses_of_this_machine_alone(address: str) -> None:
    assert is_loopback(address)
    with create_server(address, 0) as server:
        assert is_loopback(server.getsockname()[0])


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "::", "node01", ""])
def test_addresses_that_others_reach(address: str) -> None:
    assert not is_loopback(address)
    with create_server(address, 0) as server:
        assert not is_loopback(server.getsockname()[0])
