"""What ranks tell one another, as objects: whatever carries their tensors, these stay on the hosts."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from simulated_cuda import find_device
from simulated_cuda.build import build, find_obstacle

from dsjob.errors import DataError
from dsjob.ranks.agreement import all_gather, gather_on_rank_0, on_all_ranks, on_rank_0, scatter
from dsjob.ranks.mesh import Ranks, World, join_world

pytestmark = pytest.mark.slow


def fail_on_rank_1(ranks: Ranks) -> str:
    if ranks.rank == 1:
        raise DataError("rank 1 has no data")
    return "fine"


def talk(world: World) -> dict[str, Any]:
    """All ways to tell objects, among all ranks and in pairs, and how often the host has waited for the device."""
    dist.new_group([0, 1, 2])  # ranks need not be in equally many groups
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = Ranks(world.data_rank % 2, 2, groups[world.data_rank // 2])
    device = find_device()
    if device is not None:
        device.take_waits()
    told: dict[str, Any] = {}
    for name, ranks in (("all", world.everyone), ("pair", pair)):
        told[name] = {
            "all_gather": all_gather(ranks, {"rank": world.data_rank}),
            "on_rank_0": on_rank_0(ranks, lambda: world.data_rank),
            "gather_on_rank_0": gather_on_rank_0(ranks, lambda: world.data_rank),
            "scatter": scatter(ranks, lambda: [10 + world.data_rank + i for i in range(ranks.size)]),  # noqa: B023
        }
        with pytest.raises(DataError, match="rank 1 has no data"):
            on_all_ranks(ranks, lambda: fail_on_rank_1(ranks))  # noqa: B023
    return {**told, "waits": device.take_waits() if device is not None else {}}


@pytest.mark.parametrize(
    "simulated",
    [False, pytest.param(True, marks=pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or ""))],
)
def test_objects_never_travel_through_the_memory_of_a_device(simulated: bool) -> None:
    found = run_ranks(talk, 4, library=build() if simulated else None)
    for rank, told in enumerate(found):
        first = rank // 2 * 2
        assert told["all"] == {
            "all_gather": [{"rank": each} for each in range(4)],
            "on_rank_0": 0,
            "gather_on_rank_0": [0, 1, 2, 3] if rank == 0 else [],
            "scatter": 10 + rank,
        }
        assert told["pair"] == {
            "all_gather": [{"rank": first}, {"rank": first + 1}],
            "on_rank_0": first,
            "gather_on_rank_0": [first, first + 1] if rank == first else [],
            "scatter": 10 + rank,
        }
        assert told["waits"] == {}


def talk_with_few_files(world: World) -> list[int]:
    """As on a thousand ranks, where a group needs more connections than a process may usually have open."""
    dist.get_backend_config = lambda group=None: "cuda:nccl"  # type: ignore[assignment]
    limit = len(os.listdir("/proc/self/fd")) + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return all_gather(join_world(device="cpu").everyone, world.data_rank)


def test_the_limit_of_open_files_does_not_bound_the_ranks() -> None:
    assert run_ranks(talk_with_few_files, 4) == [[0, 1, 2, 3]] * 4
