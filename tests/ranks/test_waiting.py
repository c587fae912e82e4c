"""Ranks wait without a time limit for a machine that still prepares its data."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import jobs
import pytest
import small_jobs
from job_documents import resolve
from killed import wait_until
from programs import DSJOB, Program, clean_env
from ranks import run_ranks
from torch.distributed import distributed_c10d

from dsjob.contract.spec import JobSpec, view
from dsjob.errors import DataError, LostRankError
from dsjob.ranks import patience
from dsjob.ranks.mesh import World
from dsjob.ranks.waiting import waiting_for_all
from dsjob.text import Text
from dsjob.text.tokenizers import ByteTokenizer
from dsjob.training.loaders import build_training_data, share_samples
from dsjob.trust.grant import Trust

SECONDS = 2.0  # more than a collective may take in these tests


def load(world: World, folder: str, fails: bool) -> Any:
    """Rank 0 is on a machine that has the cache of texts; rank 1 is on another one, and builds it."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    patience.TO_SAY_AGAIN = 0.7
    cache = f"{folder}/machine-{world.data_rank}"
    encode = ByteTokenizer.encode

    def slow(self: Any, texts: Any, *, begins: bool) -> list[list[int]]:
        time.sleep(SECONDS if texts else 0)
        if fails and texts:
            raise DataError("no such text")
        return encode(self, texts, begins=begins)

    if world.data_rank == 0:
        Text(f"{folder}/texts.txt", cache_dir=cache)
    else:
        ByteTokenizer.encode = slow  # type: ignore[method-assign]
    with open(f"{folder}/told-{world.data_rank}", "w") as told:
        os.dup2(told.fileno(), 2)
    small = World(world.data_rank, 0, world.data_size, world.device, timeout=world.timeout)
    try:
        data = Text(f"{folder}/texts.txt", cache_dir=cache) if world.data_rank == 0 else None
        spec = view(JobSpec, resolve(small_jobs.make_document(f"{folder}/run"), world_size=2))
        read = (lambda: data) if data is not None else (lambda: Text(f"{folder}/texts.txt", cache_dir=cache))
        with waiting_for_all(small, "data.train"):
            loader = build_training_data(spec, small, None, Trust(), read)
        share_samples(loader, small)
    except Exception as error:
        return repr(error)
    return loader.samples_per_epoch


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.full
def test_a_machine_with_the_cache_waits_for_one_that_builds_it(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "texts.txt").write_text("one\n" * 24)
    found = run_ranks(load, 2, str(tmp_path), fails)
    if fails:  # rank 0 does not wait for ever
        assert found[1].startswith("DataError")
        assert isinstance(found[0], str)
    else:
        assert found == [24, 24]
    assert {f"machine-{rank}" for rank in range(2)} <= {path.name for path in tmp_path.iterdir()}
    lines = (tmp_path / "told-0").read_text().splitlines()
    assert "s for rank 1, still preparing data.train" in lines[0]


PREPARES = """
import os, time
from dsjob.ranks import patience
from dsjob.text import Text
from dsjob.text.tokenizers import ByteTokenizer

def load():
    patience.TO_MISS, patience.TO_SAY_AGAIN = 2.5, 0.7
    encode = ByteTokenizer.encode
    def slow(self, texts, *, begins):
        ids = encode(self, texts, begins=begins)
        if texts and "0001" in texts[0]:
            open("builder", "w").write(str(os.getpid()))
            time.sleep(600)
        return ids
    if os.environ["RANK"] == "1":
        ByteTokenizer.encode = slow
    return Text("texts.txt")
"""


@pytest.mark.full
def test_a_killed_rank_of_another_machine_is_noticed(tmp_path: Path) -> None:
    """Each rank has a cache of its own, as on two machines. Rank 1 is killed while it builds, and srun tells nobody."""
    jobs.make_job(tmp_path, data={"train": {"_target_": "prepares.load"}})
    (tmp_path / "prepares.py").write_text(PREPARES)
    (tmp_path / "texts.txt").write_text("".join(f"{number // 1000:04}\n" for number in range(2000)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    programs = []
    for rank in range(2):
        env = clean_env(RANK=str(rank), LOCAL_RANK="0", XDG_CACHE_HOME=str(tmp_path / f"machine-{rank}"), **place)
        programs.append(Program([DSJOB, "cfg.json"], cwd=tmp_path, env=env))
    try:
        wait_until(lambda: "texts, " in programs[0].stderr, 60, "rank 0 never waits")
        os.kill(int((tmp_path / "builder").read_text()), signal.SIGKILL)
        killed = time.monotonic()
        assert programs[0].wait(60) == LostRankError.exit_code
        assert time.monotonic() - killed < 30
    finally:
        for program in programs:
            program.kill()
    told = programs[0].stderr
    assert "s for rank 1, still preparing data.train (tokenising texts.txt: 1,000 texts, 50%)\n" in told
    assert "rank 1 has shown no sign of life for" in told
