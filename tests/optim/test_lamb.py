"""Lamb against DeepSpeed's formula in float64, against torch's Adam, and against what its norms have to be."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsjob.optim.lamb import Lamb


def run_by_hand(weight: Tensor, gradients: list[Tensor], **given: Any) -> Tensor:
    """The steps of DeepSpeed 0.19's kernel, in float64."""
    lr, (beta1, beta2) = given.get("lr", 1e-3), given.get("betas", (0.9, 0.999))
    eps, decay = given.get("eps", 1e-8), given.get("weight_decay", 0.0)
    w = weight.detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step, gradient in enumerate((g.double() for g in gradients), start=1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        root = torch.sqrt(v + eps) if given.get("eps_inside_sqrt") else torch.sqrt(v) + eps
        u = m / root + decay * w
        size, length = float(w.norm()), float(u.norm())
        ratio = 1.0
        if size and length:
            ratio = max(min(size / length, given.get("max_coeff", 10.0)), given.get("min_coeff", 0.01))
        rate = lr
        if given.get("bias_correction", True):
            rate *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
        w = w - rate * ratio * u
    return w


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lr": 0.01, "weight_decay": 0.1},
        {"lr": 0.01, "eps": 1e-2, "eps_inside_sqrt": True},
        {"lr": 0.01, "eps": 1e-2},
        {"lr": 0.01, "bias_correction": False, "betas": (0.8, 0.9)},
        {"lr": 0.01, "max_coeff": 0.2},
        {"lr": 0.01, "min_coeff": 5.0},
    ],
    ids=str,
)
def test_steps_are_those_of_deepspeeds_kernel(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(0.01 * torch.randn(7)), nn.Parameter(torch.zeros(4))]
    gradients = [[torch.randn_like(weight) for _ in range(5)] for weight in weights]
    expected = [run_by_hand(w, g, **given) for w, g in zip(weights, gradients, strict=True)]
    optimizer = Lamb(weights, **given)
    for step in range(5):
        for weight, own in zip(weights, gradients, strict=True):
            weight.grad = own[step].clone()
        optimizer.step()
    for weight, hand in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), hand, rtol=1e-5, atol=1e-7)


def test_a_step_goes_where_adams_goes_and_is_as_long_as_the_rate_says() -> None:
    torch.manual_seed(1)
    start = torch.randn(6, 4)
    moves = []
    for kind in (Lamb, torch.optim.Adam):
        weight = nn.Parameter(start.clone())
        weight.grad = torch.linspace(-1, 2, 24).view(6, 4)
        kind([weight], lr=0.01, eps=1e-12).step()
        moves.append(weight.detach() - start)
    lamb, adam = moves
    torch.testing.assert_close(lamb / lamb.norm(), adam / adam.norm())
    correction = math.sqrt(1 - 0.999) / (1 - 0.9)  # the first step's
    assert float(lamb.norm()) == pytest.approx(0.01 * correction * float(start.norm()), rel=1e-4)


def test_a_parameter_without_gradient_stays() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = Lamb([used, unused])
    used.grad = torch.ones(3)
    optimizer.step()
    assert used.tolist() != [1.0] * 3
    assert unused.tolist() == [1.0, 1.0]
    assert unused not in optimizer.state
