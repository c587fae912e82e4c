"""Groups of ranks at stage 3: hpZ and MiCS give stage 3's losses, and hold what they say."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine, train_engine, whole_state
from ranks import run_ranks
from test_stages import make_net

from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.optim.shards import local
from dsjob.ranks.mesh import World

HPZ, MICS = {"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}
ONE_GROUP = {"mics_shard_size": 4}
OFFLOADED = {"mics_shard_size": 2, "offload_optimizer": {"device": "cpu"}}
WAYS: dict[str, dict[str, Any]] = {"hpz": HPZ, "mics": MICS, "one group": ONE_GROUP, "mics, offloaded": OFFLOADED}


def make(way: dict[str, Any], **config: Any) -> Engine:
    return make_engine(3, **{**config, "zero_optimization": {"stage": 3, **way}})


def share(engine: Engine) -> float:
    """The part of all masters and of their state that this rank holds."""
    masters = list(engine.strategy.masters.values())
    assert engine.optimizer is not None
    moments = [engine.optimizer.state[p]["exp_avg"] for p in masters]
    held = [*masters, *moments]
    return sum(local(tensor).numel() for tensor in held) / sum(tensor.numel() for tensor in held)


def train(world: World, kind: str, bf16: bool) -> dict[str, tuple[list[float], dict[str, torch.Tensor], float]]:
    found = {}
    for name, way in {"plain": {}, **WAYS}.items():
        engine = make(way, net=make_net(kind), bf16=bf16, accumulation=2)
        found[name] = (train_engine(engine, 0, 2), whole_state(engine), share(engine))
    return found


@cache
def run_ways(kind: str, bf16: bool) -> list[dict[str, tuple[list[float], dict[str, torch.Tensor], float]]]:
    return run_ranks(train, 4, kind, bf16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bf16"),
    [
        ("plain", False),
        ("tied and frozen", True),
        *(pytest.param(*other, marks=pytest.mark.full) for other in (("tied and frozen", False), ("plain", True))),
    ],
)
@pytest.mark.full("tied and frozen-True")
def test_groups_give_the_losses_of_stage_3(kind: str, bf16: bool) -> None:
    for found in run_ways(kind, bf16):
        losses, state, _ = found["plain"]
        for name in WAYS:
            assert found[name][0] == pytest.approx(losses, rel=4e-3 if bf16 else 1e-6), name
            assert set(found[name][1]) == set(state)
            for key, tensor in state.items():
                if not bf16:
                    torch.testing.assert_close(found[name][1][key], tensor, rtol=0, atol=2e-6, msg=f"{name}: {key}")


@pytest.mark.slow
def test_mics_shards_within_a_group_and_hpz_over_all_ranks() -> None:
    ranks = run_ways("plain", False)
    copies = {name: sum(found[name][2] for found in ranks) for name in ranks[0]}
    assert copies == pytest.approx({"plain": 1, "hpz": 1, "mics": 2, "one group": 1, "mics, offloaded": 2})
    assert max(found["mics"][2] for found in ranks) < 0.6


def gathered_after_forward(world: World) -> dict[str, set[int]]:
    """Over how many ranks the blocks are spread between the forward and the backward pass."""
    found = {}
    for name, way in {"plain": {}, "hpz": HPZ, "mics": MICS}.items():
        engine = make(way)
        loss = engine(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
        weight = engine.module.blocks[0].fc.weight
        found[name] = {round(weight.numel() / local(weight.data).numel())}
        engine.backward(loss)
        engine.step()
    return found


@pytest.mark.slow
def test_the_backward_pass_of_hpz_gathers_within_a_group() -> None:
    for found in run_ranks(gathered_after_forward, 4):
        assert found == {"plain": {4}, "hpz": {2}, "mics": {2}}


def resume(world: World, folder: str, loads: int) -> list[bool]:
    """What each way saves, loaded into so many of the next ones; only hpZ, if into one."""
    same = []
    ways = [{}, *WAYS.values()]
    for number, way in list(enumerate(ways))[slice(None) if loads > 1 else slice(1, 2)]:
        engine = make(way)
        train_engine(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/{number}")
        expected = whole_state(engine)
        for then in [*ways, *ways][number + 1 : number + 1 + loads]:
            again = make(then)
            again.load_checkpoint(f"{folder}/{number}")
            state = whole_state(again)
            same.append(set(state) == set(expected) and all(torch.equal(state[n], t) for n, t in expected.items()))
    return same


@pytest.mark.slow
@pytest.mark.parametrize("loads", [1, 5])
@pytest.mark.full
def test_a_checkpoint_loads_into_any_grouping(tmp_path: Path, loads: int) -> None:
    for same in run_ranks(resume, 4, str(tmp_path), loads):
        assert same == [True] * (5 * loads if loads > 1 else 1)


def refuse(world: World) -> list[str]:
    said = []
    for way in ({"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}):
        try:
            make(way)
        except UsageError as error:
            said.append(f"{error.message}; {error.hint}")
    return said


@pytest.mark.slow
def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    for said in run_ranks(refuse, 3):
        assert [text.split(":")[0] for text in said] == [
            "zero_optimization.mics_shard_size",
            "zero_optimization.zero_hpz_partition_size",
        ]
        assert all("3 ranks do not divide into groups of 2; use one of 1, 3, or another" in text for text in said)
