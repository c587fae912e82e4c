"""Offloading against the same run without it: every loss and every tensor of a checkpoint, to the bit."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_net, make_engine, train_engine, whole_state
from ranks import run_ranks
from test_fp16 import FP16, Spiky, spike
from test_stages import make_net
from torch import nn

from dsjob.engine.engine import Engine
from dsjob.errors import ConfigWarning
from dsjob.optim.shards import local
from dsjob.parallel import masters
from dsjob.parallel.masters import choose_host
from dsjob.ranks.mesh import World

OPTIMIZER: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
PARAM: dict[str, Any] = {"offload_param": {"device": "cpu"}}
HALF: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
PLACES = [
    (1, OPTIMIZER),
    (2, OPTIMIZER),
    (3, OPTIMIZER),
    (3, HALF),
    (3, PARAM),
    (3, {**PARAM, **OPTIMIZER}),
]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16, reduced in fp32": {"bf16": True, "communication_data_type": "fp32"},
    "fp16": {"fp16": FP16},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def make(stage: int, offload: dict[str, Any], **config: Any) -> Engine:
    return make_engine(stage, **{**config, "zero_optimization": {"stage": stage, **offload}})


def compare(world: World, kind: str, precision: str) -> list[tuple[str, bool]]:
    def run(stage: int, accumulation: int, asked: dict[str, Any]) -> tuple[list[float], float, dict[str, torch.Tensor]]:
        engine = make(stage, asked, net=make_net(kind), accumulation=accumulation, **PRECISIONS[precision])
        losses = train_engine(engine, 0, 3)
        return losses, engine.get_global_grad_norm(), whole_state(engine)

    masters.PART = 1 << 12
    found, cells = [], list(itertools.product(PLACES, (1, 3)))
    if world.data_size == 1 and kind != "plain":  # each place with one of the accumulations
        cells = [cell for number, cell in enumerate(cells) if (number // 2 + number) % 2]
    cases = {(stage, accumulation) for (stage, _), accumulation in cells}
    on_device = {case: run(*case, {}) for case in sorted(cases)}
    for (stage, offload), accumulation in cells:
        losses, norm, expected = on_device[stage, accumulation]
        ours, our_norm, state = run(stage, accumulation, offload)
        same = losses == ours and norm == our_norm and set(state) == set(expected)
        same = same and all(torch.equal(state[n].to(t.dtype), t) for n, t in expected.items())
        found.append((f"stage {stage}, {offload}, accumulation {accumulation}", same))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kind", "precision"),
    [
        *((1, "tied and frozen", precision) for precision in PRECISIONS),
        *(
            pytest.param(*other, precision, marks=pytest.mark.full)
            for other in ((1, "plain"), (2, "plain"), (2, "tied and frozen"))
            for precision in PRECISIONS
        ),
    ],
)
@pytest.mark.full("1-tied and frozen-fp32", "1-tied and frozen-bf16, reduced in fp32")
def test_offloading_changes_no_bit(world_size: int, kind: str, precision: str) -> None:
    for found in run_ranks(compare, world_size, kind, precision):
        assert len(found) == (6 if (world_size, kind) == (1, "tied and frozen") else 12)
        for name, same in found:
            assert same, name


def overflow(world: World) -> list[bool]:
    """For each place: whether overflows are answered as without offloading."""

    def run(stage: int, asked: dict[str, Any]) -> tuple[list[tuple[float, int, bool]], dict[str, list[Any]]]:
        engine = make(stage, asked, net=Spiky(), fp16={**FP16, "hysteresis": 2, "loss_scale_window": 2})
        seen = []
        for factor in (1.0, math.inf, math.nan, 1.0, 1.0, 1.0):
            spike(engine, factor)
            seen.append((engine.loss_scale(), engine.skipped_steps, engine.was_step_applied()))
        return seen, {name: tensor.tolist() for name, tensor in whole_state(engine).items()}

    on_device = {stage: run(stage, {}) for stage in (1, 2, 3)}
    assert all(seen[-1] == (256.0, 2, True) for seen, _ in on_device.values())
    return [run(stage, offload) == on_device[stage] for stage, offload in PLACES]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.full("2")
def test_overflows_are_answered_as_without_offloading(world_size: int) -> None:
    for same in run_ranks(overflow, world_size):
        assert same == [True] * len(PLACES)


def optimize(world: World, whole: bool) -> list[tuple[str, bool]]:
    """Each optimizer at each place; unless `whole`, at every fourth place, beginning with another one."""

    def run(kind: str, stage: int, asked: dict[str, Any]) -> list[float]:
        engine = make(stage, asked, optimizer={"type": kind, "params": {"lr": 0.01}}, bf16=True)
        return train_engine(engine, 0, 3)

    masters.PART = 1 << 12
    kinds = ("Lamb", "Lion", "Muon", "SGD")
    cells = list(itertools.product(kinds, PLACES))
    cells = cells if whole else cells[:: len(kinds) + 1]
    on_device = {(kind, stage): run(kind, stage, {}) for kind, (stage, _) in cells}
    return [
        (f"{kind}, stage {stage}, {offload}", run(kind, stage, offload) == on_device[kind, stage])
        for kind, (stage, offload) in cells
    ]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.full
def test_every_optimizer_steps_on_the_host_as_on_the_device(whole: bool) -> None:
    for found in run_ranks(optimize, 2, whole):
        for name, same in found:
            assert same, name


def resume(world: World, folder: str) -> list[tuple[str, bool]]:
    """Saved with and without offloading, loaded in each of the other ways, in the midst of a step."""
    found = []
    ways = [(2, {}), *PLACES[1:5]]
    for number, (stage, offload) in enumerate(ways):
        engine = make(stage, offload, bf16=True)
        train_engine(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/{number}")
        expected, losses = whole_state(engine), train_engine(engine, 2, 2)
        for stage_then, offload_then in ways:
            again = make(stage_then, offload_then, bf16=True)
            train_engine(again, 7, 1)
            again.backward(again(*(tensor[:1] for tensor in _tokens())))
            again.load_checkpoint(f"{folder}/{number}")
            state = whole_state(again)
            same = set(state) == set(expected) and all(torch.equal(state[n], t) for n, t in expected.items())
            same = same and train_engine(again, 2, 2) == losses
            found.append((f"{stage} {offload} -> {stage_then} {offload_then}", same))
    return found


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 11, dtype=torch.int64), torch.ones(2, 11, dtype=torch.int64)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.full
def test_a_checkpoint_loads_whether_offloaded_or_not(world_size: int, tmp_path: Path) -> None:
    for found in run_ranks(resume, world_size, str(tmp_path)):
        assert len(found) == 25
        for name, same in found:
            assert same, name


def inspect(world: World, stage: int, offload: dict[str, Any]) -> dict[str, Any]:
    """Dtypes of what the model holds, and whether masters and moments are memory of their own."""
    engine = make(stage, offload, bf16=True)
    train_engine(engine, 0, 1)
    assert engine.optimizer is not None
    held = {name: local(p.data) for name, p in engine.module.named_parameters()}
    masters = {name: local(p.data) for name, p in engine.strategy.masters.items()}
    used = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    return {
        "held": {tensor.dtype for tensor in held.values()},
        "masters": {tensor.dtype for tensor in masters.values()},
        "apart": all(tensor.untyped_storage().data_ptr() not in used for tensor in masters.values()),
        "values": all(torch.equal(held[name], master.to(held[name].dtype)) for name, master in masters.items()),
        "stepped": {id(p) for p in engine.strategy.masters.values()} == {id(p) for p in engine.optimizer.state},
    }


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_model_keeps_copies_in_the_compute_dtype_alone(world_size: int, stage: int) -> None:
    for found in run_ranks(inspect, world_size, stage, OPTIMIZER):
        assert found == {
            "held": {torch.bfloat16},
            "masters": {torch.float32},
            "apart": True,
            "values": True,
            "stepped": True,
        }


def test_a_ratio_takes_whole_parameters_up_to_the_share() -> None:
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in (("a", 10), ("b", 60), ("c", 30))}
    assert choose_host(parameters, 1.0) == {"a", "b", "c"}
    assert choose_host(parameters, 0.75) == {"b", "a"}
    assert choose_host(parameters, 0.35) == {"c"}
    assert choose_host(parameters, 0.0) == set()


def test_a_ratio_leaves_the_rest_on_the_device() -> None:
    """In fp32 those are the model's own parameters, without a copy."""
    net = build_net()
    engine = make(3, HALF, net=net)
    held = {id(p): p.numel() for p in net.parameters()}
    own = sum(held.get(id(master), 0) for master in engine.strategy.masters.values())
    assert own == pytest.approx(sum(held.values()) / 2, rel=0.05)


def train_with_ignored_key(world: World) -> list[list[float]]:
    return [train_engine(make(2, asked), 0, 2) for asked in ({}, PARAM)]


def test_below_stage_3_offload_param_has_no_effect_as_in_deepspeed() -> None:
    for without, with_it in run_ranks(train_with_ignored_key, 2):
        assert without == with_it
    with pytest.warns(ConfigWarning, match="offload_param.device: has no effect below stage 3, but the stage is 2"):
        make(2, PARAM)
