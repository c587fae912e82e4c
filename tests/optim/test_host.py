"""Steps by native kernels: those of the optimizer itself, in the same state, whatever it is asked for."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from machine import lacks_commands
from torch import nn

from dsjob.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from dsjob.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from dsjob.deepspeed.ops.lamb import FusedLamb
from dsjob.deepspeed.ops.lion import DeepSpeedCPULion
from dsjob.ops import cpu_optimizers
from dsjob.optim.adam import DeepSpeedAdam
from dsjob.optim.host import can_step_on_host, prefer_kernels, set_factor, take_step
from dsjob.optim.lamb import Lamb
from dsjob.optim.lion import Lion

LACKING = lacks_commands(os.environ.get("CXX", "c++"))
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
    "without correction": lambda p: DeepSpeedAdam(p, lr=0.01, bias_correction=False, weight_decay=0.1),
    "L2": lambda p: DeepSpeedAdam(p, lr=0.01, adam_w_mode=False, weight_decay=0.1),
    "Lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
    "Lamb": lambda p: Lamb(p, lr=0.01, weight_decay=0.1),
    "Lamb with eps inside": lambda p: Lamb(p, lr=0.01, eps=0.1, eps_inside_sqrt=True, bias_correction=False),
    "DeepSpeedCPUAdam": lambda p: DeepSpeedCPUAdam(p, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1, lr_decay=0.5, initial_accumulator_value=0.1),
}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert cpu_optimizers.find_problem() == ""


def make() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((3, 5), (700,), (1,), (0,), (4, 4))]


def give_gradients(*models: list[nn.Parameter], seed: int, without: int = -1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, alike in enumerate(zip(*models, strict=True)):
        gradient = torch.randn(alike[0].shape, generator=generator).to(alike[0].dtype)
        for parameter in alike:
            parameter.grad = None if number == without else gradient.clone()


@pytest.mark.parametrize("name", KINDS)
def test_the_steps_are_those_of_the_optimizer(name: str) -> None:
    """With two groups of different rates, a parameter that misses a step, and a change to and from the kernels."""
    plain, native = make(), make()
    first, second = (KINDS[name]([{"params": p[:2]}, {"params": p[2:], "lr": 0.02}]) for p in (plain, native))
    assert can_step_on_host(second)
    for step in range(6):
        give_gradients(plain, native, seed=step, without=1 if step == 2 else -1)
        if step == 1:
            prefer_kernels(second)
        first.step()
        take_step(second)
        for one, other in zip(plain, native, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=5e-6)
    mine, theirs = second.state_dict(), first.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=1e-5, atol=1e-6)


def test_gradients_stay_and_schedules_count_the_step() -> None:
    parameters = make()
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    prefer_kernels(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    give_gradients(parameters, seed=0)
    kept = [copy.deepcopy(parameter.grad) for parameter in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a schedule steps before its optimizer
        take_step(optimizer)
        schedule.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, kept, strict=True) if p.grad is not None)


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Lamb", "Adagrad"])
def test_gradients_are_multiplied_by_a_factor(name: str) -> None:
    """Also those that the kernels leave to the optimizer, and all of them once hooks are added."""
    plain, native = make(), make()
    for model in (plain, native):
        model.append(nn.Parameter(torch.ones(3, dtype=torch.float64)))
    first, second = KINDS[name](plain), KINDS[name](native)
    prefer_kernels(second)
    set_factor(second, 0.25)
    for step in range(4):
        give_gradients(plain, native, seed=step)
        for parameter in plain:
            parameter.grad.mul_(0.25)  # type: ignore[union-attr]
        if step == 2:
            second.register_step_post_hook(lambda *_: None)
        first.step()
        take_step(second)
        for one, other in zip(plain, native, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Lamb", "Adagrad"])
def test_copies_get_the_new_weights(name: str) -> None:
    parameters = make()
    optimizer = KINDS[name](parameters)
    kept = {p: torch.full(p.shape, 9.0, dtype=torch.bfloat16) for p in parameters[::2]}
    give_gradients(parameters, seed=0, without=2)
    assert take_step(optimizer, kept) == []
    prefer_kernels(optimizer)
    assert [id(p) for p in take_step(optimizer, kept)] == [id(parameters[0]), id(parameters[4])]
    for number in (0, 4):
        assert torch.equal(kept[parameters[number]], parameters[number].bfloat16())
    assert torch.equal(kept[parameters[2]], torch.full((1,), 9.0, dtype=torch.bfloat16))


class Own(torch.optim.AdamW):
    """A program's optimizer: it may change the update."""


class Wrapped(DeepSpeedAdam):
    def _init_group(self, *given: Any) -> Any:
        return super()._init_group(*given)


Wrapped.__module__ = DeepSpeedAdam.__module__


def test_deepspeeds_names_are_stepped_by_kernels() -> None:
    for kind in (DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedLamb):
        assert can_step_on_host(kind(make()))
        hooked: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__})
        hooked.step = torch.optim.Optimizer.profile_hook_step(kind.step)  # as torch does in the first class it meets
        assert can_step_on_host(hooked(make()))


def test_what_the_kernels_lack_is_left_to_the_optimizer() -> None:
    for build in (
        lambda p: Own(p),
        lambda p: Wrapped(p),
        lambda p: torch.optim.SGD(p),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, maximize=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    ):
        assert not can_step_on_host(build(make()))
    hooked = torch.optim.AdamW(make())
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_step_on_host(hooked)


def test_one_group_or_parameter_may_be_left_to_the_optimizer() -> None:
    """amsgrad in one group; a transposed and a double parameter in the other."""
    pairs = []
    for _ in range(2):
        odd = [nn.Parameter(torch.ones(3, 4).t()), nn.Parameter(torch.ones(3, dtype=torch.float64))]
        groups = [{"params": make(), "amsgrad": True}, {"params": [*make(), *odd]}]
        pairs.append(torch.optim.AdamW(groups, lr=0.01))
    first, second = pairs
    prefer_kernels(second)
    models = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in pairs]
    for step in range(3):
        give_gradients(*models, seed=step)
        first.step()
        take_step(second)
    for one, other in zip(*models, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    assert second.state[models[1][0]].keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
