"""The mesh of a job: its axes, the groups along them, and what they cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import make_engine
from ranks import run_ranks
from simulated_cuda.build import build, find_obstacle

from dsjob.document.bare import resolve_config
from dsjob.engine.build import build_engine
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.ranks.axes import Axes, build_mesh
from dsjob.ranks.mesh import World, join_world
from dsjob.ranks.mpu import divide

NAMES = ("pipe", "replicate", "shard", "context", "tensor")
LIBRARIES = [
    None,
    pytest.param("simulated", marks=pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")),
]


def count_communicators() -> int:
    """The process groups of this rank that can send anything."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(dist.get_backend(group) != "fake" for group in groups)


def find_library(name: str | None) -> Path | None:
    return build() if name else None


def describe(world: World) -> dict[str, Any]:
    """The mesh of `world`, who this rank meets along each axis, and how many communicators were made for it."""
    before = count_communicators()
    mesh = world.mesh
    assert world.mesh is mesh
    sums = {}
    for name in NAMES:
        number = torch.tensor(10.0 ** dist.get_rank(), device=world.device)
        dist.all_reduce(number, group=mesh.get_group(name))
        sums[name] = int(number)
    return {
        "names": mesh.mesh_dim_names,
        "shape": tuple(mesh.shape),
        "place": mesh.get_coordinate(),
        "sums": sums,
        "made": count_communicators() - before,
        "data": (world.data_mesh.mesh_dim_names, world.data_mesh.mesh.tolist()),
        "everyone": mesh.get_group("shard") is dist.group.WORLD,
    }


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.full("4-simulated", "4-None")
def test_the_mesh_of_an_ordinary_job_needs_no_communicator_of_its_own(ranks: int, library: str | None) -> None:
    """Not one for the axis that all ranks lie along, and none for axes of size 1."""
    found = run_ranks(describe, ranks, library=find_library(library))
    for rank, told in enumerate(found):
        assert told["names"] == NAMES
        assert told["shape"] == (1, 1, ranks, 1, 1)
        assert tuple(told["place"]) == (0, 0, rank, 0, 0)
        assert told["sums"] == dict.fromkeys(NAMES, 10**rank) | {"shard": int("1" * ranks)}
        assert told["made"] == 0
        assert told["everyone"]
        assert told["data"] == (("shard",), list(range(ranks)))


def start_alone(world: World) -> dict[str, Any]:
    spec, _ = resolve_config(
        {"train_batch_size": 1, "zero_optimization": {"stage": 3}}, world_size=1, locate=lambda _: ("test", 0, 0)
    )
    build_engine(torch.nn.Linear(2, 2), spec, world, kind=Engine)
    joined = dist.is_initialized()
    return {"joined": joined, "before": (world.ensure_group(), count_communicators())[1], **describe(world)}


def test_a_process_that_is_alone_joins_no_group_until_the_mesh_is_asked_for() -> None:
    (told,) = run_ranks(start_alone, 1)
    assert not told["joined"]
    assert told["before"] == 1
    assert (told["shape"], told["made"], told["everyone"]) == ((1, 1, 1, 1, 1), 0, True)
    assert set(told["sums"].values()) == {1}


def make_copies(world: World) -> dict[str, Any]:
    engine = make_engine(3, zero_optimization={"stage": 3, "mics_shard_size": 2})
    assert engine.world.copies == 2
    first = describe(dataclasses.replace(world, copies=2))
    assert engine.strategy.world.mesh is dataclasses.replace(world, copies=2, loads=False).mesh
    return first


@pytest.mark.parametrize("library", LIBRARIES)
def test_copies_lie_along_replicate_and_their_parts_are_neighbours(library: str | None) -> None:
    found = run_ranks(make_copies, 4, library=find_library(library))
    for rank, told in enumerate(found):
        assert told["shape"] == (1, 2, 2, 1, 1)
        assert tuple(told["place"]) == (0, rank // 2, rank % 2, 0, 0)
        assert told["sums"]["shard"] == (11 if rank < 2 else 1100)
        assert told["sums"]["replicate"] == (101 if rank % 2 == 0 else 1010)
        assert told["data"] == (("replicate", "shard"), [[0, 1], [2, 3]])
        assert told["made"] == 0  # the engine has asked before


class Unit:
    """An mpu with groups of its own: ranks r and r + `models` hold one model."""

    def __init__(self, models: int, size: int) -> None:
        rank = dist.get_rank()
        self.model = dist.new_subgroups_by_enumeration([[d + models * m for m in range(size)] for d in range(models)])[
            0
        ]
        self.data = dist.new_subgroups_by_enumeration([[d + models * m for d in range(models)] for m in range(size)])[0]
        self.data_rank, self.models = rank % models, models

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self.models

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_model_parallel_group(self) -> Any:
        return self.model


def divide_ranks(world: World, models: int, size: int) -> list[dict[str, Any]]:
    unit = Unit(models, size)
    by_groups = divide(world, unit)
    assert by_groups.mesh.get_group("shard") is unit.data
    assert by_groups.mesh.get_group("tensor") is unit.model
    by_fields = divide(world, {"data_parallel_rank": unit.get_data_parallel_rank(), "data_parallel_world_size": models})
    return [describe(by_groups), describe(by_fields)]


@pytest.mark.parametrize(("models", "size"), [(2, 2), (1, 3), (1, 2)])
def test_the_groups_of_an_mpu_lie_along_shard_and_tensor_in_whatever_order_it_has_them(models: int, size: int) -> None:
    for rank, both in enumerate(run_ranks(divide_ranks, models * size, models, size)):
        data, model = rank % models, rank // models
        for told in both:
            assert told["shape"] == (1, 1, models, 1, size)
            assert tuple(told["place"]) == (0, 0, data, 0, model)
            assert told["sums"]["shard"] == sum(10 ** (d + models * model) for d in range(models))
            assert told["sums"]["tensor"] == sum(10 ** (data + models * m) for m in range(size))
            assert told["data"] == (("shard",), [d + models * model for d in range(models)])
            assert told["made"] == 0


def cross(world: World) -> dict[str, Any]:
    mesh = build_mesh(Axes(pipe=2, shard=2), world.device.type)
    members = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in NAMES}
    return {"members": members, "place": tuple(mesh.get_coordinate() or ())}


def test_neighbours_differ_in_the_innermost_axis() -> None:
    found = run_ranks(cross, 4)
    assert [told["place"] for told in found] == [(0, 0, 0, 0, 0), (0, 0, 1, 0, 0), (1, 0, 0, 0, 0), (1, 0, 1, 0, 0)]
    assert [told["members"]["shard"] for told in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [told["members"]["pipe"] for told in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [told["members"]["tensor"] for told in found] == [[0], [1], [2], [3]]


def put_twice(world: World) -> str:
    class Twice(Unit):
        def get_data_parallel_group(self) -> Any:
            return self.model

        def get_data_parallel_rank(self) -> int:
            return dist.get_rank(self.model)

    with pytest.raises(UsageError) as caught:
        divide(world, Twice(2, 2))
    return caught.value.message


def test_an_mpu_that_puts_two_ranks_in_one_place_is_refused_on_all() -> None:
    told = "the mpus of ranks 0 and 1 both return data-parallel rank 0 and model-parallel rank 0"
    assert run_ranks(put_twice, 4) == [told] * 4


def leave_and_join(world: World) -> list[bool]:
    first = world.mesh
    dist.destroy_process_group()
    again = join_world(device="cpu")
    return [again.mesh is first, again.mesh.get_group("shard") is dist.group.WORLD]


def test_a_mesh_does_not_outlive_its_process_group() -> None:
    assert run_ranks(leave_and_join, 1) == [[False, True]]
