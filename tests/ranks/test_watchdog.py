"""Ranks without a launcher of dsjob's: what one has to say of its end reaches the others, who end with it."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import list_commits, make_job
from programs import DSJOB, Program, clean_env, run_program
from torch.distributed import HashStore

from dsjob.ranks import watchdog
from dsjob.ranks.stalls import Beat
from dsjob.ranks.watchdog import StoreBoard, read_beat

pytestmark = pytest.mark.slow

MODULE = """
import ctypes, os, signal, time
from my_model import Net as Plain

def fail(how):
    if how == "exception":
        raise ValueError("the data are wrong")
    if how == "os._exit":
        os._exit(3)
    if how == "library":
        ctypes.CDLL(None)._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)

class Net(Plain):
    calls = 0

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, y):
        Net.calls += 1
        if Net.calls == 3 and os.environ["RANK"] == "0":
            time.sleep(2)  # the others have looked at the store by then
            fail(self.how)
        while Net.calls == 3:  # as in a wait of NCCL's, which nothing but the watchdog ends
            time.sleep(0.1)
        return super().forward(x, y)
"""


@pytest.fixture(scope="module")
def lone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[Program]]]:
    """For each way that a selected test needs, two ranks, of which rank 0 fails so; all at once, since they wait."""
    test = test_a_rank_0_that_takes_the_store_with_it_ends_the_others
    selected = [item for item in request.session.items if isinstance(item, pytest.Function) and item.function is test]
    ways = [item.callspec.params["how"] for item in selected]
    jobs = {how: start_lone(tmp_path_factory.mktemp("lone"), how) for how in ways}
    yield jobs
    for rank in itertools.chain.from_iterable(jobs.values()):
        rank.kill()


def start_lone(folder: Path, how: str) -> list[Program]:
    model = {"_target_": "lone.Net", "how": how}
    make_job(folder, model=model, data={"train": {"_target_": "my_model.Data"}})
    (folder / "lone.py").write_text(MODULE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    environments = [clean_env(**place, RANK=str(rank), GLOO_SOCKET_IFNAME="lo") for rank in range(2)]
    return [Program([DSJOB, "cfg.json"], cwd=folder, env=environment) for environment in environments]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exception", "dsjob: rank 1 ends because another rank has failed: rank 0: ValueError: the data are wrong"),
        pytest.param(
            "os._exit",
            "dsjob: rank 1 ends because another rank has failed: rank 0: user code called os._exit(3)",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "library",
            "dsjob: rank 1 ends because rank 0, which hosts the ranks' store, is gone",
            marks=pytest.mark.full,
        ),
        ("SIGKILL", "dsjob: rank 1 ends because rank 0, which hosts the ranks' store, is gone"),
    ],
)
def test_a_rank_0_that_takes_the_store_with_it_ends_the_others(
    lone: dict[str, list[Program]], how: str, said: str
) -> None:
    """As in a PyTorchJob, or under srun."""
    ranks = lone[how]
    ranks[0].communicate(timeout=90)
    began = time.monotonic()
    _, errors = ranks[1].communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert ranks[1].returncode == 76, errors
    assert said in errors


@pytest.mark.parametrize("failing", ["CrashOnRank1", "Nan"])
@pytest.mark.full
def test_a_sweep_under_torchrun_goes_on_after_a_run_that_fails(tmp_path: Path, unused_port: int, failing: str) -> None:
    make_job(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={unused_port}"]
    done = run_program(
        [*command, "--no-python", DSJOB, "-m", "cfg.json", f"model._target_=my_model.{failing},my_model.Net"],
        cwd=tmp_path,
        env=clean_env(GLOO_SOCKET_IFNAME="lo"),
    )
    assert done.returncode == 1
    results = [json.loads((tmp_path / "run" / str(number) / "result.json").read_text()) for number in range(2)]
    assert [result["status"] for result in results] == ["failed", "done"], (done.stdout, done.stderr)
    told = "rank 1: ValueError: rank 1 has had enough" if failing == "CrashOnRank1" else "the loss became nan in step 1"
    assert told in results[0]["error"]
    assert results[1]["step"] == 6
    assert list_commits(tmp_path / "run" / "1") == ["step-00000006"]
    assert done.stdout.count("== run 1: ") == 1
    assert done.stdout.count("sweep run") == 1
    assert "run 0 failed: " in done.stdout


def test_the_runs_of_a_sweep_under_torchrun_do_not_continue_one_another(tmp_path: Path, unused_port: int) -> None:
    make_job(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={unused_port}"]
    done = run_program(
        [*command, "--no-python", DSJOB, "-m", "cfg.json", "optimizer.params.lr=0.01,0.001"],
        cwd=tmp_path,
        env=clean_env(GLOO_SOCKET_IFNAME="lo"),
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / "run" / str(number) / "result.json").read_text()) for number in range(2)]
    assert [result["status"] for result in results] == ["done", "done"]
    assert results[0]["metrics"]["loss"] != results[1]["metrics"]["loss"]
    assert "already finished" not in done.stdout


class Counting(HashStore):
    """A store that counts how often it is asked."""

    calls = 0

    def clone(self) -> Counting:
        return self

    def __getattribute__(self, name: str) -> object:
        if name in ("check", "get", "multi_get", "set"):
            Counting.calls += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("silent", [[], [7, 300]])
def test_the_beats_of_many_ranks_cost_few_questions(silent: list[int]) -> None:
    size, store = 512, Counting()
    for rank in set(range(size)) - set(silent):
        store.set(f"watch/beat/{rank}", Beat(rank, 0, 0, "training").to_text())
    board = StoreBoard(store, 0, size)
    Counting.calls = 0
    beats = board.read_beats()
    assert Counting.calls <= (2 if not silent else 50)
    assert {rank: beat.step for rank, beat in beats.items()} == {n: n for n in range(size) if n not in silent}


def test_a_rank_that_waits_for_a_stack_gives_its_own() -> None:
    """Else a rank that all others wait for asks itself in vain, and leaves their questions open in the meantime."""
    board = StoreBoard(Counting(), 0, 2)
    assert any("in test_a_rank_that_waits_for_a_stack_gives_its_own" in frame for frame in board.ask_for_stack(0, 0.5))


def test_a_beat_is_read_while_the_process_groups_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may end at any time, and the thread reads beats until then."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def count(group: dist.ProcessGroup) -> int:
        dist.destroy_process_group()
        return 1

    monkeypatch.setattr(watchdog, "count_collectives", count)
    assert read_beat().collectives == 0
