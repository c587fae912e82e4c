"""Steps of which the device decides: which optimizers can, and what of a schedule is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dsjob.compute.verdict import Verdict, can_decide


class OnGpu(nn.Parameter):
    """A parameter that says that it is on a GPU, and counts how often it is asked."""

    asked = 0

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        OnGpu.asked += 1
        return True


def make_sgd(momentum: float) -> Optimizer:
    optimizer = SGD([OnGpu(torch.zeros(2)), OnGpu(torch.zeros(3))], lr=0.1, momentum=momentum)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return optimizer


def test_sgd_decides_once_its_momentum_is_there() -> None:
    assert can_decide(make_sgd(0.0))
    optimizer = make_sgd(0.9)
    first, second = optimizer.param_groups[0]["params"]
    assert not can_decide(optimizer)
    optimizer.state[first]["momentum_buffer"] = torch.zeros(2)
    assert not can_decide(optimizer)
    optimizer.state[second]["momentum_buffer"] = torch.zeros(3)
    assert can_decide(optimizer)
    optimizer.state.clear()
    assert not can_decide(optimizer)


def test_parameters_are_looked_at_once() -> None:
    optimizer = make_sgd(0.0)
    assert can_decide(optimizer)
    before = OnGpu.asked
    assert can_decide(optimizer)
    assert OnGpu.asked == before
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert not can_decide(optimizer)


class Reached:
    """An event of a device that has come to it."""

    def synchronize(self) -> None:
        pass


def make_verdict(optimizer: Optimizer, finite: bool) -> Verdict:
    verdict = Verdict.__new__(Verdict)
    given: Any = {"_optimizer": optimizer, "_undo": None, "_finite": torch.tensor(finite), "_event": Reached()}
    vars(verdict).update(given)
    return verdict


@pytest.mark.parametrize("finite", [False, True])
def test_a_learning_rate_in_a_tensor_is_put_back(finite: bool) -> None:
    rate = torch.tensor(1.0)
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=rate)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    verdict = make_verdict(optimizer, finite)
    verdict.step_schedule(scheduler, {})
    assert optimizer.param_groups[0]["lr"].item() == 0.5
    assert verdict.read() is finite
    assert optimizer.param_groups[0]["lr"] is rate
    assert (rate.item(), scheduler.last_epoch) == ((0.5, 1) if finite else (1.0, 0))


def test_a_schedules_model_is_not_copied() -> None:
    class Heavy(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError

    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    scheduler.model = Heavy(2, 2)  # type: ignore[attr-defined]
    optimizer.step()
    verdict = make_verdict(optimizer, finite=False)
    verdict.step_schedule(scheduler, {})
    assert not verdict.read()
    assert optimizer.param_groups[0]["lr"] == 1.0
