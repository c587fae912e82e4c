"""Topologies: which rank is where, against a count by hand; and the ranks of a job divided along all axes."""

from __future__ import annotations

import time
from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from dsjob import torch_private
from dsjob.errors import UsageError
from dsjob.ranks.axes import Axes
from dsjob.ranks.divide import divide_axes, join_along
from dsjob.ranks.mesh import World
from dsjob.ranks.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    order_ranks,
)


def test_ranks_are_numbered_along_the_last_axis_first() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert [tuple(topology.get_coord(rank)) for rank in range(8)] == list(product(range(2), repeat=3))
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("expert") == []
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("model", 1) == [1, 3, 5, 7]
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=["data"], inner_sep="=", outer_sep=",") == "pipe=01,model=01"
    assert (topology.get_dim("data"), topology.get_dim("expert"), topology.world_size()) == (2, 0, 8)


def test_the_groups_of_an_axis_contain_each_rank_once() -> None:
    for dims in product((1, 2, 3), repeat=3):
        topology = ProcessTopology(["a", "b", "c"], dims)
        for axis, size in zip("abc", dims, strict=True):
            groups = topology.get_axis_comm_lists(axis)
            assert {len(group) for group in groups} == {size}
            assert sorted(chain(*groups)) == list(range(topology.world_size()))


def test_ranks_in_the_order_of_the_mesh() -> None:
    assert order_ranks(PipeDataParallelTopology(2, 2)) == (0, 1, 2, 3)
    assert order_ranks(ProcessTopology(["data", "pipe"], [2, 2])) == (0, 2, 1, 3)
    assert order_ranks(ProcessTopology(["model", "pipe", "data"], [2, 1, 2])) == (0, 2, 1, 3)
    started = time.monotonic()
    assert order_ranks(PipeModelDataParallelTopology(16, 8, 32)) == tuple(
        (pipe * 32 + data) * 8 + model for pipe in range(16) for data in range(32) for model in range(8)
    )
    assert time.monotonic() - started < 5  # 4,096 ranks; twenty seconds if each looks at all others
    with pytest.raises(UsageError, match="axis expert"):
        order_ranks(ProcessTopology(["pipe", "expert"], [2, 2]))


def test_mistakes() -> None:
    topology = PipeDataParallelTopology(2, 2)
    with pytest.raises(UsageError, match="coordinate on each axis"):
        topology.get_rank(pipe=0)
    with pytest.raises(UsageError, match="no rank at"):
        topology.get_rank(pipe=2, data=0)
    with pytest.raises(UsageError, match="no rank 4"):
        topology.get_coord(4)
    for axes, dims in ((["pipe"], [2, 2]), (["pipe", "pipe"], [2, 2]), (["pipe"], [0])):
        with pytest.raises(UsageError, match="a topology has axes"):
            ProcessTopology(axes, dims)


def look(world: World, sizes: dict[str, int], order: tuple[int, ...]) -> dict[str, Any]:
    divided = divide_axes(world, **sizes, order=order)
    met = {}
    for axis in (*Axes._fields, "model"):
        ranks = divided.model if axis == "model" else divided.along(axis)
        number = torch.tensor(2.0 ** dist.get_rank())
        if ranks.size > 1:
            dist.all_reduce(number, group=ranks.group)
        met[axis] = (ranks.rank, ranks.size, int(number))
    place = divided.mesh.get_coordinate()
    assert place is not None
    groups = {axis: dist.get_process_group_ranks(divided.mesh.get_group(axis)) for axis in Axes._fields}
    return {"met": met, "place": tuple(place), "shape": tuple(divided.mesh.shape), "groups": groups}


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ({"pipe": 2}, ()),
        ({"pipe": 2}, (0, 2, 1, 3)),
        ({"pipe": 2, "tensor": 2}, ()),
        ({"context": 2}, ()),
        ({"pipe": 4}, ()),
    ],
)
@pytest.mark.full("sizes2-order2", "sizes3-order3", "sizes4-order4")
def test_each_rank_knows_its_place_along_each_axis(sizes: dict[str, int], order: tuple[int, ...]) -> None:
    found = run_ranks(look, 4, sizes, order)
    axes = Axes(**sizes, shard=4 // torch.tensor(list(sizes.values())).prod().item())  # type: ignore[arg-type]
    places = torch.tensor(order or range(4)).view(axes)
    for rank, told in enumerate(found):
        place = tuple(int(number) for number in (places == rank).nonzero()[0])
        assert (told["place"], told["shape"]) == (place, tuple(axes))
        for number, axis in enumerate(Axes._fields):
            line = places[tuple(slice(None) if n == number else p for n, p in enumerate(place))].tolist()
            assert told["met"][axis] == (place[number], axes[number], sum(2**other for other in line))
            assert told["groups"][axis] == line
        model = places[:, place[1], place[2]].flatten().tolist()
        assert told["met"]["model"] == (model.index(rank), len(model), sum(2**other for other in model))


def refuse(world: World) -> str:
    with pytest.raises(UsageError) as found:
        divide_axes(world, pipe=2)
    assert divide_axes(world) is world
    return f"{found.value.message}; {found.value.hint}"


def test_ranks_that_do_not_divide() -> None:
    for told in run_ranks(refuse, 3):
        assert told == "3 ranks do not divide into groups of 2, which hold one model each; start 2 ranks"


def test_a_rank_creates_only_its_own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1,024 ranks: one along each axis, one of those that hold a copy of the model, and one of those that tie."""
    made: list[int] = []
    make = torch_private._new_process_group_helper

    def count(size: int, *args: Any, **given: Any) -> Any:
        made.append(size)
        return make(size, *args, **given)

    with torch_private.imagining_ranks(1024):
        monkeypatch.setattr(torch_private, "_new_process_group_helper", count)
        monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", count)
        world = World(data_rank=0, local_rank=0, data_size=1024, device=torch.device("cpu"))
        divided = divide_axes(world, pipe=8, context=2, tensor=4)
        tied = join_along(divided, "pipe", (0, 7))
        assert dist.get_process_group_ranks(divided.data.group) == list(range(0, 128, 8))
        assert dist.get_process_group_ranks(tied.group) == [0, 896]
    assert made == [8, 2, 4, 16, 64, 2]


def join_often(world: World) -> list[int]:
    """Groups that overlap, of ranks that are in different numbers of other groups, some with the same ranks."""
    sums = []
    if world.everyone.rank in (0, 3):
        dist.new_group([0, 3], use_local_synchronization=True)
    for divided in (divide_axes(world, pipe=4), divide_axes(world, pipe=4, order=(3, 1, 2, 0))):
        for places in ((0, 3), (0, 1), (1, 3), (0, 3), (1, 2, 3)):
            joined = join_along(divided, "pipe", places)
            number = torch.tensor(2.0 ** dist.get_rank())
            if joined.size > 1:
                dist.all_reduce(number, group=joined.group)
            sums.append(int(number))
    pair = divide_axes(world, pipe=2)
    number = torch.tensor(2.0 ** dist.get_rank())
    dist.all_reduce(number, group=pair.data.group)
    return [*sums, int(number)]


def test_groups_of_the_same_ranks_meet_each_time() -> None:
    found = run_ranks(join_often, 4)
    for rank, sums in enumerate(found):
        want = []
        for order in ((0, 1, 2, 3), (3, 1, 2, 0)):
            for places in ((0, 3), (0, 1), (1, 3), (0, 3), (1, 2, 3)):
                ranks = [order[place] for place in places]
                want.append(sum(2**other for other in (ranks if rank in ranks else [rank])))
        assert sums == [*want, 3 if rank < 2 else 12]
