"""The hook of optimizers that communicate by themselves: all that strategies, engine and checkpoints ask of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

import dsjob
from dsjob.optim.onebit.onebit_adam import OneBitAdam
from dsjob.optim.onebit.own_gradients import list_own_state, unite_norms, wants_own_gradients
from dsjob.ranks.mesh import World


def make_optimizer(*, freeze_step: int = 1) -> tuple[OneBitAdam, nn.Parameter]:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return OneBitAdam([weight], freeze_step=freeze_step), weight


def test_an_optimizer_is_asked_before_each_step() -> None:
    optimizer, weight = make_optimizer(freeze_step=2)
    seen = []
    for _ in range(3):
        seen.append(wants_own_gradients(optimizer))
        optimizer.step()
    assert seen == [False, False, True]
    assert "worker_error" in list_own_state(optimizer)
    for other in (torch.optim.SGD([weight]), None):
        assert not wants_own_gradients(other)
        assert not list_own_state(other)


def unite(world: World) -> list[float]:
    frozen = make_optimizer(freeze_step=1)[0]
    frozen.step()
    norm, huge = torch.tensor([3.0, 4.0][world.data_rank]), torch.tensor(1e30)
    return [float(unite_norms(optimizer, norm, norm.device)) for optimizer in (None, frozen)] + [
        float(unite_norms(frozen, huge, huge.device))  # its square is no fp32 number
    ]


def test_norms_of_own_gradients_are_united_and_others_are_left_alone() -> None:
    mean = (12.5) ** 0.5
    for own, (alone, united, huge) in zip((3.0, 4.0), run_ranks(unite, 2), strict=True):
        assert (alone, united, huge) == (own, pytest.approx(mean), pytest.approx(1e30))


def test_no_other_code_looks_at_what_such_optimizers_say() -> None:
    package = Path(dsjob.__file__).parent
    asks = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.parent.name != "onebit" and any(word in path.read_text() for word in (".communicates", 'own_state"'))
    ]
    assert asks == []
