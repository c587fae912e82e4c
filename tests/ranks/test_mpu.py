"""Model-parallel units that raise on one rank: all ranks are told, and errors have their place in the document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from job_documents import make_job, resolve
from ranks import run_ranks

from dsjob.contract.spec import JobSpec, view
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World
from dsjob.training.build import divide_ranks
from dsjob.trust.frames import describe_failure, find_path
from dsjob.trust.grant import Trust

TRUST = Trust(folders=(str(Path(__file__).parent),))


class Unit:
    """Each rank holds a model by itself. The method named `fails` raises on rank 1, `size` is what is said of both."""

    def __init__(self, fails: str = "", size: int = 2) -> None:
        self.fails, self.size = fails, size

    def _raise_on_rank_1(self, method: str) -> None:
        if method == self.fails and dist.get_rank() == 1:
            raise ValueError("no group here")

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return self.size

    def get_data_parallel_group(self) -> Any:
        self._raise_on_rank_1("data")
        return dist.group.WORLD

    def get_model_parallel_group(self) -> Any:
        self._raise_on_rank_1("model")
        return None


def divide_by(world: World, arguments: dict[str, Any]) -> tuple[str, str, tuple[str | int, ...]]:
    """The type of the error that this rank has raised, its text and its path in the document."""
    mpu = {"_target_": "test_mpu.Unit", **arguments}
    document = make_job(trainer={"micro_batch": 4, "max_steps": 1, "mpu": mpu})
    try:
        divide_ranks(view(JobSpec, resolve(document, world_size=2)), world, TRUST)
    except UsageError as error:
        return "UsageError", error.message, find_path(error)
    except Exception as error:
        return type(error).__name__, describe_failure(error), find_path(error)
    return "", "", ()


@pytest.mark.parametrize("fails", ["data", "model"])
def test_a_group_that_one_rank_cannot_give_stops_all(fails: str) -> None:
    waiting, failed = run_ranks(divide_by, 2, {"fails": fails})
    path = ("trainer", "mpu", "_target_")
    assert (failed[0], failed[2]) == ("ValueError", path)
    assert failed[1].startswith("trainer.mpu: ValueError: no group here (")
    assert (waiting[0], waiting[2]) == ("UsageError", path)
    assert waiting[1].startswith("trainer.mpu: rank 1: ValueError: no group here (")


def test_sizes_that_do_not_fit_have_their_place() -> None:
    for kind, told, path in run_ranks(divide_by, 2, {"size": 3}):
        assert (kind, path) == ("UsageError", ("trainer", "mpu", "_target_"))
        assert told.startswith("trainer.mpu: the mpu describes 3 data-parallel x 1 model-parallel ranks")
