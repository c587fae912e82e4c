"""The 1-bit optimizers on one rank, where nothing travels: formulas in float64, policies by counting, masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsjob.contract.spec import Method
from dsjob.errors import UsageError
from dsjob.optim import build_optimizer
from dsjob.optim.onebit.onebit_adam import OneBitAdam
from dsjob.optim.onebit.onebit_lamb import OneBitLamb
from dsjob.optim.onebit.zero_one_adam import ZeroOneAdam, local_interval, variance_interval


def step_through(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach().double()


def make_gradients(*shape: int, steps: int = 7) -> tuple[nn.Parameter, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return nn.Parameter(torch.randn(shape, generator=generator)), [
        torch.randn(shape, generator=generator) * (1 + step) for step in range(steps)
    ]


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_onebit_adam_freezes_the_average_of_squares(corrected: bool, inside: bool) -> None:
    weight, gradients = make_gradients(5, 3)
    w = weight.detach().double()
    m = v = torch.zeros_like(w)
    for t, gradient in enumerate((g.double() for g in gradients), start=1):
        m = 0.9 * m + 0.1 * gradient
        if t <= 3:
            v = 0.99 * v + 0.01 * gradient**2
        first, second = (1 - 0.9**t, 1 - 0.99 ** min(t, 3)) if corrected else (1, 1)
        root = torch.sqrt(v / second + 1e-3) if inside else torch.sqrt(v / second) + 1e-3
        w = w - 0.01 * (m / first / root + 0.1 * w)
    given = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1, "freeze_step": 3}
    optimizer = OneBitAdam([weight], bias_correction=corrected, eps_inside_sqrt=inside, **given)
    torch.testing.assert_close(step_through(optimizer, weight, gradients), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_onebit_lamb_goes_on_with_its_average_ratio_and_a_factor_near_the_last(decay: float) -> None:
    """DeepSpeed's OnebitLamb of 0.19 in float64, with a momentum that is not compressed."""
    weight, gradients = make_gradients(4, 6)
    w = weight.detach().double()
    m = v = torch.zeros_like(w)
    average, last_factor, factors = 0.0, 1.0, []
    fresh = v
    for t, gradient in enumerate((g.double() for g in gradients), start=1):
        before, m = m, 0.9 * m + 0.1 * gradient
        if t <= 3:
            v = fresh = 0.99 * v + 0.01 * gradient**2
            u = m / (torch.sqrt(v) + 1e-8) + decay * w
            ratio = max(min(float(w.norm() / u.norm()), 10.0), 0.01)
            average = 0.9 * average + 0.1 * ratio
        else:
            implied = (m - 0.9 * before) / (1 - 0.9)
            fresh = 0.99 * fresh + 0.01 * implied**2
            plain = m / (torch.sqrt(v) + 1e-8)
            u = plain + decay * w
            factor = float(((torch.sqrt(v) + 1e-8) / (torch.sqrt(fresh) + 1e-8)).max())
            share = min(1.0, float(plain.norm() / u.norm())) if decay else 1.0
            factor = max(min(factor * share + 1 - share, 4.0), 0.5)
            last_factor = max(min(factor, last_factor * 1.1), last_factor * 0.9)
            factors.append(last_factor)
            ratio = average * last_factor
        w = w - 0.01 * ratio * u
    assert min(factors) < 0.95
    optimizer = OneBitLamb(
        [weight], lr=0.01, betas=(0.9, 0.99), weight_decay=decay, freeze_step=3, bias_correction=False
    )
    torch.testing.assert_close(step_through(optimizer, weight, gradients), w, rtol=1e-5, atol=1e-6)


def test_zero_one_adam_moves_its_average_of_squares_at_multiples_of_the_interval() -> None:
    weight, gradients = make_gradients(3, 3, steps=12)
    w = weight.detach().double()
    m = v = torch.zeros_like(w)
    moved = [1, 2, 4, 6, 8]  # two at each interval, 1, 2 and 4; then it is frozen
    for t, gradient in enumerate((g.double() for g in gradients), start=1):
        m = 0.9 * m + 0.1 * gradient
        if t in moved:
            v = 0.99 * v + 0.01 * gradient**2
        second = 1 - 0.99 ** sum(t >= own for own in moved)
        w = w - 0.01 * (m / (1 - 0.9**t) / (torch.sqrt(v / second) + 1e-8) + 0.1 * w)
    given: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizer = ZeroOneAdam([weight], var_freeze_step=9, var_update_scaler=2, **given)
    torch.testing.assert_close(step_through(optimizer, weight, gradients), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("updates", [1, 2, 3, 16])
def test_the_interval_of_the_average_of_squares_is_that_of_deepspeeds_counters(updates: int) -> None:
    interval, counter = 1, 0
    for step in range(1, 3000):
        assert variance_interval(step, updates) == interval, step
        if step % interval == 0:
            counter += 1
            if counter == updates:
                counter, interval = 0, interval * 2


@pytest.mark.parametrize(("doubling", "most"), [(1, 16), (3, 16), (5, 12), (7, 1)])
def test_the_interval_of_exchanges_is_that_of_deepspeeds_counters(doubling: int, most: int) -> None:
    interval, counter = 1, 0
    for step in range(200):
        assert local_interval(step, doubling, most) == interval, step
        counter += 1
        if counter == doubling:
            counter, interval = 0, min(most, interval * 2)


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_what_has_had_no_gradient_at_the_freeze_or_is_masked_stays(kind: Any) -> None:
    weight, unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    optimizer = kind(
        [{"params": [weight], "exp_avg_mask": torch.tensor([1, 1, 0, 1])}, {"params": [unused]}], freeze_step=2
    )
    for _ in range(2):
        weight.grad = torch.tensor([0.0, 1.0, 1.0, 1.0])
        optimizer.step()
    before = weight.detach().clone()
    weight.grad, unused.grad = torch.ones(4), torch.ones(2)
    optimizer.step()
    assert [bool(moved) for moved in weight != before] == [False, True, False, True]
    assert unused.tolist() == [1.0, 1.0]
    weight.grad = None  # as if by zeros: the momentum goes on
    before = weight.detach().clone()
    optimizer.step()
    assert [bool(moved) for moved in weight != before] == [False, True, False, True]


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb"])
def test_a_freeze_before_the_first_step_is_refused(name: str) -> None:
    with pytest.raises(Exception, match="at least one step"):
        build_optimizer(
            Method(name, {"lr": 0.1, "betas": [0.9, 0.999], "freeze_step": 0}, None), [nn.Parameter(torch.ones(2))]
        )


def test_state_comes_back_with_the_count_of_steps_and_the_own_mask() -> None:
    weight, gradients = make_gradients(6)
    mask = torch.tensor([1, 0, 1, 1, 1, 1])
    optimizer = OneBitAdam([{"params": [weight], "exp_avg_mask": mask}], freeze_step=2)
    step_through(optimizer, weight, gradients[:3])
    other = OneBitAdam([{"params": [weight]}], freeze_step=2)
    other.load_state_dict(optimizer.state_dict())
    assert other.communicates
    assert "exp_avg_mask" not in other.param_groups[0]
    optimizer.load_state_dict(other.state_dict())
    assert torch.equal(optimizer.param_groups[0]["exp_avg_mask"], mask)
    assert math.isclose(float(other.state[weight]["step"]), 3.0)


def test_a_mask_may_be_flat_and_has_the_size_of_its_parameters() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    mask = torch.tensor([1, 0, 1, 1, 1, 1])
    optimizer = OneBitAdam([{"params": [weight], "exp_avg_mask": mask}], freeze_step=1)
    for _ in range(3):
        weight.grad = torch.ones(2, 3)
        optimizer.step()
    assert optimizer.state[weight]["exp_avg"].flatten()[1] == 0
    assert bool((optimizer.state[weight]["exp_avg"].flatten()[2:] != 0).all())
    with pytest.raises(
        UsageError, match=r"exp_avg_mask has shape \[5\], but a parameter of its group has shape \[2, 3\]"
    ):
        OneBitAdam([{"params": [weight], "exp_avg_mask": mask[:5]}], freeze_step=1)
    optimizer.param_groups[0]["exp_avg_mask"] = mask[:5]
    with pytest.raises(UsageError, match="exp_avg_mask"):
        optimizer.step()
