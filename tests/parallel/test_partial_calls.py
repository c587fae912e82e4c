"""Calls of a part of a sharded model: they find whole parameters, before and after the first call of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import make_engine
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.ranks.mesh import World


class Half(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.end = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.end(x)


class Pair(nn.Module):
    """Two halves that share a table, as an encoder and a decoder do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = nn.Embedding(8, 4)
        self.first, self.second, self.head = Half(table), Half(table), nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.first(tokens) * self.second(tokens)).square().mean()


def call_parts(world: World, stage: int) -> list[Any]:
    """What the first half returns before any call of the model and after each of two steps; the losses; a loss of a
    program that calls the halves itself."""
    engine = make_engine(stage, net=Pair())
    tokens, found = torch.arange(8).view(2, 4), []
    for _ in range(2):
        with torch.no_grad():
            found.append(engine.module.first(tokens))
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    whole: Any = engine.module
    own = whole.head(whole.first(tokens) * whole.second(tokens)).square().mean()
    engine.backward(own)
    engine.step()
    found += [own.detach(), whole.first(tokens).detach(), engine(tokens).detach()]
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_may_be_called_by_itself(stage: int) -> None:
    expected = run_ranks(call_parts, 2, 0)[0]
    for rank in run_ranks(call_parts, 2, stage):
        for ours, theirs in zip(rank, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
