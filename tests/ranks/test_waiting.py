"""Ranks wait without a time limit for a machine that still prepares its data."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import small_jobs
from job_documents import resolve
from ranks import run_ranks
from torch.distributed import distributed_c10d

from dsjob.contract.spec import JobSpec, view
from dsjob.errors import DataError
from dsjob.ranks import patience
from dsjob.ranks.mesh import World
from dsjob.ranks.waiting import waiting_for_all
from dsjob.text import Text
from dsjob.text.tokenizers import ByteTokenizer
from dsjob.training.loaders import build_training_data, share_samples
from dsjob.trust.grant import Trust

SECONDS = 3.0  # more than a collective may take in these tests


def load(world: World, folder: str, fails: bool) -> Any:
    """Rank 0 is on a machine that has the cache of texts; rank 1 is on another one, and builds it."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    patience.TO_SAY_AGAIN = 1.0
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
@pytest.mark.full("False")
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
