"""Lion against its definition, element by element in float64."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from dsjob.optim.lion import Lion


def step_by_hand(weight: float, average: float, gradient: float, lr: float, betas: Any, decay: float) -> Any:
    direction = betas[0] * average + (1 - betas[0]) * gradient
    sign = 0.0 if direction == 0 else math.copysign(1.0, direction)
    return weight - lr * (sign + decay * weight), betas[1] * average + (1 - betas[1]) * gradient


@pytest.mark.parametrize(("betas", "decay"), [((0.9, 0.999), 0.0), ((0.5, 0.6), 0.1)])
def test_a_step_is_that_of_the_definition(betas: tuple[float, float], decay: float) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = Lion([weight], lr=0.01, betas=betas, weight_decay=decay)
    expected = [(value, 0.0) for value in weight.flatten().tolist()]
    for _ in range(6):
        weight.grad = torch.randn(4, 3)
        pairs = zip(expected, weight.grad.flatten().tolist(), strict=True)
        expected = [step_by_hand(w, m, gradient, 0.01, betas, decay) for (w, m), gradient in pairs]
        optimizer.step()
    averages = optimizer.state[weight]["exp_avg"].flatten().tolist()
    assert weight.flatten().tolist() == pytest.approx([w for w, _ in expected], abs=1e-6)
    assert averages == pytest.approx([m for _, m in expected], abs=1e-6)


def test_gradients_of_one_sign_move_a_weight_by_the_rate_and_none_leaves_it() -> None:
    weights = nn.Parameter(torch.zeros(3))
    unused = nn.Parameter(torch.ones(2))
    optimizer = Lion([weights, unused], lr=0.25)
    for size in (1e-6, 3.0, 1e4):
        weights.grad = torch.tensor([size, -size, 0.0])
        optimizer.step()
    assert weights.tolist() == [-0.75, 0.75, 0.0]
    assert unused.tolist() == [1.0, 1.0]
