"""Adam without bias correction: the closed form, whole and in shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.mesh import World
from dsjob.optim.adam import UncorrectedAdam


def follow(weight: Tensor, gradients: list[Tensor], *, decoupled: bool, decay: float) -> Tensor:
    """The weight after these steps, with sums written out in place of running averages."""
    lr, (b1, b2), eps = 0.01, (0.9, 0.99), 1e-6
    used: list[Tensor] = []
    for gradient in gradients:
        used.append(gradient if decoupled else gradient + decay * weight)
        powers = range(len(used) - 1, -1, -1)
        first = sum((1 - b1) * b1**k * g for k, g in zip(powers, used, strict=True))
        second = sum((1 - b2) * b2**k * g * g for k, g in zip(powers, used, strict=True))
        update = first / (torch.as_tensor(second).sqrt() + eps)
        weight = weight - lr * (update + (decay * weight if decoupled else 0))
    return weight


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_the_closed_form(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(5)]
    weight = nn.Parameter(start.clone())
    optimizer = UncorrectedAdam([weight], 0.01, (0.9, 0.99), 1e-6, 0.1, decoupled)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), follow(start, gradients, decoupled=decoupled, decay=0.1))


def train(world: World, stage: int, offload: str) -> Tensor:
    torch.manual_seed(0)
    params = {"lr": 0.01, "betas": [0.9, 0.99], "bias_correction": False, "weight_decay": 0.1}
    zero = {"stage": stage, **({"offload_optimizer": {"device": offload}} if offload else {})}
    optimizer = {"type": "Adam", "params": params}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "zero_optimization": zero}
    engine = dsjob.initialize(model=nn.Linear(5, 3), config=config)[0]
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 5, generator=generator)).square().mean())
        engine.step()
    return engine.module_state_dict()["weight"]


def train_stages(world: World) -> list[Tensor]:
    return [train(world, stage, offload) for stage, offload in [(0, ""), (1, ""), (2, "cpu"), (3, "")]]


def test_shards_take_the_steps_of_the_whole() -> None:
    for weights in run_ranks(train_stages, 2):
        for weight in weights[1:]:
            torch.testing.assert_close(weight, weights[0])
