"""Parameters on a disk against the same run in memory, to the bit, on real ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import train_engine, whole_state
from ranks import run_ranks
from test_nvme import PRECISIONS, find_size, load, make, on, save_then_load

from dsjob.contract.sharding import choose_kept
from dsjob.engine.engine import Engine
from dsjob.errors import StorageError
from dsjob.parallel import shards_on_disk, zero
from dsjob.ranks.mesh import World


def on_disk(folder: str, **more: Any) -> dict[str, Any]:
    """Parameters on a disk, all of them."""
    return {"offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, **more}}


def is_same(ours: Engine, expected: Engine) -> bool:
    state, found = whole_state(expected), whole_state(ours)
    same = set(state) == set(found) and ours.get_global_grad_norm() == expected.get_global_grad_norm()
    return same and all(torch.equal(found[n].to(t.dtype), t) for n, t in state.items())


def compare(world: World, folder: str, kind: str, precision: str, accumulation: int, more: dict[str, Any]) -> list[str]:
    """Cases in which a run with its parameters on a disk differs from the one in memory."""
    wrong = []

    def build(place: dict[str, Any]) -> Engine:
        return make(3, {**place, **more}, precision, kind, accumulation=accumulation)

    expected = build({})
    losses = train_engine(expected, 0, 3)
    places: dict[str, dict[str, Any]] = {
        "state in memory": on_disk(folder),
        "state beside them": {**on_disk(folder, buffer_count=1), **on("nvme", folder)},
        "state on another disk": {**on_disk(folder, buffer_count=2), **on("nvme", f"{folder}/other")},
        "large blocks": on_disk(folder, buffer_size=1),
        "some in memory": on_disk(folder, max_in_cpu=800),
    }
    for number, (name, place) in enumerate(places.items()):
        short = (world.data_size, kind, precision, accumulation) == (2, "plain", "fp32", 1)
        if short and number % 2:  # the normal run's other case has all places
            continue
        ours = build(place)
        if train_engine(ours, 0, 3) != losses or not is_same(ours, expected) or find_size(ours) == 0:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("world_size", "kind", "precision", "accumulation", "more"),
    [
        (2, "plain", "fp32", 1, {}),
        (1, "tied and frozen", "bf16", 3, {}),
        *(
            pytest.param(size, kind, precision, accumulation, {}, marks=pytest.mark.full)
            for size in (1, 2, 3)
            for kind in ("plain", "tied and frozen")
            for precision in PRECISIONS
            for accumulation in (1, 3)
            if (size, kind, precision, accumulation) not in ((2, "plain", "fp32", 1), (1, "tied and frozen", "bf16", 3))
        ),
        pytest.param(4, "plain", "bf16", 2, {"zero_hpz_partition_size": 2}, marks=pytest.mark.full),
        pytest.param(4, "plain", "bf16", 2, {"mics_shard_size": 2}, marks=pytest.mark.full),
        pytest.param(2, "plain", "bf16", 1, {"mics_shard_size": 1}, marks=pytest.mark.full),
    ],
)
def test_parameters_on_a_disk_change_no_bit(
    world_size: int, kind: str, precision: str, accumulation: int, more: dict[str, Any], tmp_path: Path
) -> None:
    for wrong in run_ranks(compare, world_size, str(tmp_path), kind, precision, accumulation, more):
        assert wrong == []


@pytest.mark.parametrize(
    ("save_on", "load_on", "before", "after"),
    [
        ("disk", "none", 2, 1),
        *(
            pytest.param(*places, before, after, marks=pytest.mark.full)
            for places in (("disk", "disk"), ("none", "disk"), ("disk", "cpu"))
            for before, after in ((1, 1), (2, 2), (1, 2), (2, 1))
        ),
    ],
)
def test_a_checkpoint_moves_between_disk_and_memory(
    save_on: str, load_on: str, before: int, after: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    places = {"disk": {**on_disk(folder), **on("nvme", folder)}, "cpu": {"offload_param": {"device": "cpu"}}}
    expected = run_ranks(save_then_load, before, folder, places.get(save_on, {}), 3, "fp32")
    found = run_ranks(load, after, folder, places.get(load_on, {}), 3, "fp32")
    means = [
        [sum(losses) / len(losses) for losses in zip(*ranks, strict=True)]
        for ranks in (expected, [losses for losses, _ in found])
    ]
    assert means[1] == (means[0] if before == after else pytest.approx(means[0], rel=1e-5))
    assert all(size > 0 for _, size in found) or load_on != "disk"


def write(world: World, folder: str) -> tuple[bool, list[float], list[float]]:
    """Weights that a program changes between steps, with parameters on a disk and in memory; then an evaluation."""
    losses = []
    for place in ({}, on_disk(folder)):
        engine = make(3, place)
        train_engine(engine, 0, 1)
        with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            for parameter in engine.module.parameters():
                parameter.data.mul_(0.5)
        losses.append(train_engine(engine, 1, 2))
        with torch.no_grad():
            tokens = torch.ones(2, 11, dtype=torch.int64)
            losses[-1] += [float(engine(tokens, tokens)) for _ in range(2)]
        state = engine.module.state_dict()
        losses[-1] += [float(value.sum()) for value in state.values()]
    return losses[0] == losses[1], *losses


def test_a_program_writes_weights_and_evaluates(tmp_path: Path) -> None:
    for same, expected, found in run_ranks(write, 2, str(tmp_path)):
        assert same, (expected, found)


def trace(world: World, folder: str, buffers: int) -> list[tuple[str, int]]:
    """The order in which the second step begins to read units, and needs them."""
    events: list[tuple[str, int]] = []
    watch = shards_on_disk.read_before_gathers

    def watching(unit: Any, needed: Any, done: Any, *, alone: bool) -> None:
        def need(backward: bool) -> None:
            events.append(("need", needed.args[0]))
            needed(backward)

        watch(unit, need, done, alone=alone)

    shards_on_disk.read_before_gathers = watching
    engine = make(3, on_disk(folder, buffer_count=buffers))
    shards = engine.strategy._on_disk
    start = shards._start
    shards._start = lambda unit: (events.append(("read", unit)), start(unit))
    train_engine(engine, 0, 1)
    events.clear()
    train_engine(engine, 1, 1)
    return events


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_units_that_follow_are_read_ahead(world_size: int, tmp_path: Path) -> None:
    """Four units: what is outside the blocks (0), which stays gathered, and three blocks."""
    for events in run_ranks(trace, world_size, str(tmp_path), 5):
        assert [unit for kind, unit in events if kind == "need"] == [0, 1, 2, 3, 3, 2, 1]
        assert [unit for kind, unit in events if kind == "read"] == [0, 1, 2, 3]
        assert events.index(("read", 3)) < events.index(("need", 1))
    for events in run_ranks(trace, world_size, str(tmp_path), 2):
        assert [unit for kind, unit in events if kind == "read"] == [0, 1, 2, 3, 1]
        assert events.index(("read", 3)) < events.index(("need", 3))
        again = events[events.index(("need", 3)) :]
        assert again.index(("read", 1)) < again.index(("need", 1))


def test_a_disk_that_fails_ends_in_an_error_and_older_checkpoints_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(3, on_disk(str(tmp_path)))
    train_engine(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path / "checkpoints"))

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        with pytest.raises(StorageError, match=r"cannot read from .*Input/output error"):
            train_engine(engine, 1, 1)
    again = make(3, on_disk(str(tmp_path)))
    again.load_checkpoint(str(tmp_path / "checkpoints"))
    expected = make(3, {})
    train_engine(expected, 0, 1)
    assert train_engine(again, 1, 1) == train_engine(expected, 1, 1)


def test_parameters_stay_in_memory_in_order_as_far_as_they_fit() -> None:
    assert choose_kept([10, 60, 30, 5], 0) == set()
    assert choose_kept([10, 60, 30, 5], 45) == {0, 2, 3}
    assert choose_kept([10, 60, 30, 5], 105) == {0, 1, 2, 3}
