"""Steps in parts: the numbers of a step over everything, for the optimizers that may take them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dsjob.deepspeed.ops.adam import DeepSpeedCPUAdam
from dsjob.optim.host import take_step
from dsjob.optim.lamb import Lamb
from dsjob.optim.lion import Lion
from dsjob.optim.muon import MuonWithAuxAdam
from dsjob.optim.onebit.onebit_adam import OneBitAdam
from dsjob.optim.parts import can_step_in_parts, step_in_parts, step_own_parts
from dsjob.optim.shards import local
from dsjob.ranks.mesh import World

SEPARATE: dict[Any, dict[str, Any]] = {
    torch.optim.Adadelta: {},
    torch.optim.Adagrad: {"lr_decay": 0.1},
    torch.optim.Adam: {"amsgrad": True},
    torch.optim.AdamW: {},
    torch.optim.Adamax: {},
    torch.optim.NAdam: {},
    torch.optim.RAdam: {},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
    torch.optim.SGD: {"momentum": 0.9, "nesterov": True},
    DeepSpeedCPUAdam: {"bias_correction": False},
    Lion: {},
}


class Own(torch.optim.SGD):
    """A program's optimizer: it may do more in a step than torch's."""


def make() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(6)]


@pytest.mark.parametrize("kind", SEPARATE)
def test_parts_take_the_steps_of_the_whole(kind: Any) -> None:
    whole, apart = make(), make()
    told: list[tuple[int, list[bool]]] = []

    def build(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind([{"params": weights[:4]}, {"params": weights[4:]}], lr=0.1, **SEPARATE[kind])
        return made

    first, second = build(whole), build(apart)
    assert can_step_in_parts(second)
    generator = torch.Generator().manual_seed(1)
    for step in range(7):  # RAdam changes its formula in the sixth
        before = [weight.detach().clone() for weight in apart]
        for number, pair in enumerate(zip(whole, apart, strict=True)):
            gradient = torch.randn(3, 2, generator=generator) if step != 2 or number != 1 else None
            for weight in pair:
                weight.grad = gradient.clone() if gradient is not None else None

        def done(number: int, before: list[Tensor] = before) -> None:
            told.append((number, [not torch.equal(a, b) for a, b in zip(apart, before, strict=True)]))

        first.step()
        parts = [[apart[0], apart[5]], [apart[2]], [apart[4], apart[3]]]
        step_in_parts(second, parts, take_step, done)
        for one, other in zip(whole, apart, strict=True):
            assert torch.equal(one, other)
        assert all(weight.grad is None for weight in apart)
    # The first part is stepped with what is in none; each is told of when later ones have not moved yet.
    assert told[:3] == [
        (0, [True, True, False, False, False, True]),
        (1, [True, True, True, False, False, True]),
        (2, [True] * 6),
    ]


def test_others_step_at_once() -> None:
    weights = make()
    others = [
        torch.optim.LBFGS(weights),
        Own(weights, lr=0.1),
        Lamb(weights),  # has a collective in a step
        OneBitAdam(weights),
        MuonWithAuxAdam([{"params": weights, "use_muon": True}]),
    ]
    assert not any(map(can_step_in_parts, others))
    hooked = torch.optim.SGD(weights, lr=0.1)
    handle = hooked.register_step_post_hook(lambda *_: None)  # which would be called for each part
    assert not can_step_in_parts(hooked)
    handle.remove()
    assert can_step_in_parts(hooked)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_a_program_has_wrapped_is_called_once(scheduled: bool) -> None:
    optimizer = torch.optim.SGD(make(), lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step` too, to know whether it was called
    assert can_step_in_parts(optimizer)
    original = optimizer.step

    @functools.wraps(original)
    def step() -> None:
        original()

    optimizer.step = step  # type: ignore[assignment,method-assign]
    assert not can_step_in_parts(optimizer)


def step_sharded(world: World, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> list[str]:
    """Steps sharded parameters as DTensors, and as this rank's parts. What differs; the state must be DTensors."""
    mesh = init_device_mesh("cpu", (world.data_size,))
    found: list[str] = []
    models: list[list[nn.Parameter]] = []
    optimizers = []
    for _ in range(2):
        sharded = [nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])) for weight in make()]
        models.append(sharded)
        optimizers.append(kind(sharded, lr=0.1, **options))
    generator = torch.Generator().manual_seed(1)
    for _ in range(7):
        for pair in zip(*models, strict=True):
            gradient = torch.randn(3, 2, generator=generator)
            for weight in pair:
                weight.grad = distribute_tensor(gradient.clone(), mesh, [Shard(0)])
        optimizers[0].step()
        step_own_parts(optimizers[1])
    for number, (one, other) in enumerate(zip(*models, strict=True)):
        first, second = (optimizer.state[w] for optimizer, w in zip(optimizers, (one, other), strict=True))
        tensors = [(one, other), *((first[name], second[name]) for name in first)]
        found += [f"{number}: values" for a, b in tensors if not torch.equal(local(a), local(b))]
        found += [f"{number}: types" for a, b in tensors if type(a) is not type(b)]
    return found


@pytest.mark.parametrize("kind", [k for k in SEPARATE if k is not Lion])
def test_steps_of_own_parts_are_those_of_sharded_tensors(kind: Any) -> None:
    assert run_ranks(step_sharded, 2, kind, SEPARATE[kind]) == [[], []]
