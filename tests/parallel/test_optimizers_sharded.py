"""Optimizers that look at whole parameters give under sharding what they give on one rank."""

from typing import Any

import pytest
import torch
from engines import make_engine, train_engine, whole_state
from ranks import run_ranks
from test_stages import TiedNet
from torch import Tensor

from dsjob.ranks.mesh import World

OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}},
    {"type": "Lion", "params": {"lr": 0.001, "weight_decay": 0.1}},
    {
        "type": "AdamW",
        "params": {"lr": 0.01, "weight_decay": 0.1},
        "param_groups": {"no_decay": {"match": ["*bias", "*ln*"], "weight_decay": 0}},
    },
    {"type": "Muon", "params": {"weight_decay": 0.1}},
    {"type": "Muon", "params": {"lr": 0.01, "ns_method": "standard"}},
]


def train_stages(world: World, optimizer: dict[str, Any], stages: list[int]) -> dict[int, dict[str, Tensor]]:
    found = {}
    for stage in stages:
        engine = make_engine(stage, net=TiedNet(), optimizer=optimizer)
        train_engine(engine, 0, 4)
        found[stage] = whole_state(engine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda optimizer: "-".join(map(str, [optimizer["type"], *optimizer["params"]]))
)
@pytest.mark.full("Muon-lr-ns_method", "Lamb-lr-weight_decay", "AdamW-lr-weight_decay")
def test_two_ranks_give_at_every_stage_what_one_rank_gives(optimizer: dict[str, Any]) -> None:
    (alone,) = run_ranks(train_stages, 1, optimizer, [0])
    for found in run_ranks(train_stages, 2, optimizer, [0, 1, 2, 3]):
        for stage, state in found.items():
            assert set(state) == set(alone[0])
            for name, expected in alone[0].items():
                torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=2e-6, msg=f"stage {stage}: {name}")
