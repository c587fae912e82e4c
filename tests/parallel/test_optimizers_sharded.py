"""Optimizers that look at whole parameters give under sharding what they give on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_config, make_engine, train_engine, whole_state
from ranks import run_ranks
from test_stages import TiedNet
from torch import Tensor

import dsjob
from dsjob.ranks.mesh import World

ADAFACTOR = {"_target_": "transformers.Adafactor", "beta1": 0.9, "weight_decay": 0.1}
OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}},
    {"type": "Lion", "params": {"lr": 0.001, "weight_decay": 0.1}},
    {
        "type": "AdamW",
        "params": {"lr": 0.01, "weight_decay": 0.1},
        "param_groups": {"no_decay": {"match": ["*bias", "*ln*"], "weight_decay": 0}},
    },
    {"type": "Rprop", "params": {"lr": 0.001}},
    {"type": "Adafactor", "params": {"lr": 0.01}},
    ADAFACTOR,
    {"type": "Muon", "params": {"weight_decay": 0.1}},
    {"type": "Muon", "params": {"lr": 0.01, "ns_method": "standard"}},
]


def train_stages(world: World, optimizer: dict[str, Any], stages: list[int]) -> dict[int, dict[str, Tensor]]:
    found = {}
    for stage in stages:
        engine = make_engine(stage, net=TiedNet(), optimizer=optimizer)
        train_engine(engine, 0, 3)
        found[stage] = whole_state(engine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    OPTIMIZERS,
    ids=lambda optimizer: "-".join([str(next(iter(optimizer.values()))), *optimizer.get("params", ())]),
)
@pytest.mark.parametrize("stages", [[2, 3], pytest.param([0, 1, 2, 3], marks=pytest.mark.full)], ids=["two", "all"])
@pytest.mark.full(
    "two-Muon-lr-ns_method",
    "two-Lamb-lr-weight_decay",
    "two-AdamW-lr-weight_decay",
    "two-Rprop-lr",
    "two-Lion-lr-weight_decay",
)
@pytest.mark.full("two-transformers.Adafactor")
def test_two_ranks_give_at_every_stage_what_one_rank_gives(optimizer: dict[str, Any], stages: list[int]) -> None:
    (alone,) = run_ranks(train_stages, 1, optimizer, [0])
    for found in run_ranks(train_stages, 2, optimizer, stages):
        for stage, state in found.items():
            assert set(state) == set(alone[0])
            for name, expected in alone[0].items():
                torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=2e-6, msg=f"stage {stage}: {name}")


def train_from(world: World, folder: Path, stage: int, first: int, steps: int) -> dict[str, Tensor]:
    engine = make_engine(stage, net=TiedNet(), optimizer=ADAFACTOR)
    if first:
        engine.load_checkpoint(str(folder))
    train_engine(engine, first, steps)
    engine.save_checkpoint(str(folder))
    return whole_state(engine)


@pytest.mark.full
def test_the_state_of_adafactor_moves_between_shards_and_one_rank(tmp_path: Path) -> None:
    (expected,) = run_ranks(train_from, 1, tmp_path / "whole", 0, 0, 4)
    run_ranks(train_from, 2, tmp_path / "run", 2, 0, 1)
    run_ranks(train_from, 1, tmp_path / "run", 0, 1, 2)
    for found in run_ranks(train_from, 2, tmp_path / "run", 3, 3, 1):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=2e-6, msg=name)


class Halving(torch.optim.Optimizer):
    """Mixes whole and sharded tensors, as optimizers may that know nothing of shards."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(torch.full(parameter.shape, 0.5))


def step_halving(world: World, stage: int) -> None:
    config = make_config(stage)
    del config["optimizer"]
    train_engine(dsjob.initialize(model=TiedNet(), optimizer=Halving, config=config)[0], 0, 1)


def test_an_optimizer_that_cannot_step_shards_says_so() -> None:
    run_ranks(step_halving, 2, 0)
    with pytest.raises(Exception, match="Halving cannot step sharded parameters: "):
        run_ranks(step_halving, 2, 2)
