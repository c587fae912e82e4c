"""Blocks that are computed again, on real ranks at every stage: the same numbers and names as without, less memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_net, make_engine, train_engine, whole_state
from net import Net
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.mesh import World

STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "every second": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "offloaded": {"mode": "full", "cpu_checkpointing": True},
}


class DropBlock(nn.Module):
    """The fixtures' block with dropout around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.drop(self.inner(self.drop(x)))
        return kept


def make_net(kind: str) -> Net:
    net = build_net()
    if kind == "dropout":
        net.blocks = nn.ModuleList(DropBlock(block) for block in net.blocks)
    if kind == "tied and frozen":
        net.head.weight = net.emb.weight
        net.emb.requires_grad_(False)  # so that the input of the first block needs no gradient
        net.blocks[1].requires_grad_(False)
    return net


def train(kind: str, stage: int, config: dict[str, Any], accumulation: int = 1) -> dict[str, Any]:
    torch.manual_seed(7)
    engine = make_engine(stage, net=make_net(kind), accumulation=accumulation, **config)
    losses = train_engine(engine, 0, STEPS)
    return {
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
        "state": whole_state(engine),
        "random": torch.get_rng_state(),
    }


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def compare_ways(world: World, kind: str, accumulation: int, precisions: tuple[str, ...]) -> list[Any]:
    """Of each stage, precision and way: what a run with it gives, and what one without."""
    rows = []
    for stage, precision in itertools.product(range(4), precisions):
        plain = train(kind, stage, PRECISIONS[precision], accumulation)
        for name, section in WAYS.items():
            if name == "selective" and precision == "autocast" and stage:
                continue  # a rule refuses it
            config = {**PRECISIONS[precision], "activation_checkpointing": section}
            rows.append((f"stage {stage}, {precision}, {name}", train(kind, stage, config, accumulation), plain))
    return rows


def check_equal(rows: list[Any]) -> None:
    for name, found, plain in rows:
        assert found["losses"] == plain["losses"], name
        assert found["norm"] == plain["norm"], name
        assert torch.equal(found["random"], plain["random"]), name
        assert found["state"].keys() == plain["state"].keys(), name
        for key, tensor in plain["state"].items():
            torch.testing.assert_close(found["state"][key], tensor, rtol=0, atol=0, msg=f"{name}: {key}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dropout", "tied and frozen"])
@pytest.mark.parametrize(
    ("world_size", "accumulation", "precisions"),
    [(1, 3, ("fp32", "bf16")), (2, 1, ("fp32", "bf16")), (2, 3, ("fp16", "autocast"))],
)
def test_every_stage_gives_bit_for_bit_what_it_gives_without(
    world_size: int, accumulation: int, precisions: tuple[str, ...], kind: str
) -> None:
    for rows in run_ranks(compare_ways, world_size, kind, accumulation, precisions):
        assert len(rows) == 4 * len(precisions) * len(WAYS) - 3 * ("autocast" in precisions)
        check_equal(rows)
