"""Ranks that have built different models are told the first difference before they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World


class Net(nn.Module):
    def __init__(self, layers: int = 2, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width)] + [nn.Linear(width, width) for _ in range(layers - 1)])
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().mean()


def build(kind: str, differs: bool) -> nn.Module:
    net = Net(layers=2 + (kind == "layer" and differs), width=4 + 2 * (kind == "width" and differs))
    if kind == "missing layer" and not differs:
        net = Net(layers=3)
    if kind == "order" and differs:
        layers = [("1", net.layers[1]), ("0", net.layers[0])]
        net.layers = nn.ModuleDict(layers)
    if kind == "frozen" and differs:
        net.layers[1].bias.requires_grad_(False)
    if kind == "dtype" and differs:
        net.layers[0].to(torch.bfloat16)
    if kind == "buffer" and differs:
        net.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
    return net


KINDS = {
    "layer": "rank 1 has layers.2.weight ([4, 4] torch.float32, trained), which rank 0 lacks",
    "missing layer": "rank 0 has layers.2.weight ([4, 4] torch.float32, trained), which rank 1 lacks",
    "width": "layers.0.weight is [4, 4] torch.float32, trained on rank 0, but [6, 4] torch.float32, trained on rank 1",
    "frozen": "layers.1.bias is [4] torch.float32, trained on rank 0, but [4] torch.float32, frozen on rank 1",
    "dtype": "layers.0.weight is [4, 4] torch.float32, trained on rank 0, but [4, 4] torch.bfloat16, trained on rank 1",
    "buffer": "rank 1 has mask ([3] torch.bool, a buffer), which rank 0 lacks",
    "order": "rank 0 defines layers.0.weight where rank 1 defines layers.1.weight",
}


def compare(world: World, stage: int) -> dict[str, str]:
    found = {}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    for kind in KINDS:
        try:
            dsjob.initialize(model=build(kind, world.data_rank == 1), config=config)
        except UsageError as error:
            found[kind] = str(error)
    dsjob.initialize(model=build("layer", False), config=config)  # the ranks can go on with equal models
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_show_the_first_difference(stage: int) -> None:
    for found in run_ranks(compare, 3 if stage else 2, stage):
        assert found.keys() == KINDS.keys()
        for kind, words in KINDS.items():
            assert "the ranks have different models" in found[kind]
            assert words in found[kind]
