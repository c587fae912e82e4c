"""A model that a second engine gets after the first, as programs do that train in phases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import ADAMW, build_net, make_config, make_deepspeed_engine, make_engine, train_engine, whole_state
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.deepspeed.utils import safe_get_full_optimizer_state
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def train_in_phases(
    world: World, stage: int, bf16: bool, zero: dict[str, Any], frozen: str
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """The losses of two phases with two engines, the state at the end, and the names of trained parameters."""
    net = build_net()
    given = list(net.parameters())
    section = {"zero_optimization": {"stage": stage, **zero}}
    first = make_deepspeed_engine(stage, net=net, bf16=bf16, **section)
    losses = train_engine(first, 0, 2)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    slower = {**ADAMW, "params": {**ADAMW["params"], "lr": 0.001}}
    again = {"activation_checkpointing": {"mode": "full"}, "gradient_accumulation_steps": 3}
    config = make_config(stage, bf16=bf16, optimizer=slower, **section, **again)
    # Programs list parameters before the first `initialize`.
    listed = given if not frozen else None
    second = dsjob.deepspeed.initialize(model=net, model_parameters=listed, config=config)[0]
    assert second.global_steps == 0
    losses += train_engine(second, 2, 2)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    moments = [safe_get_full_optimizer_state(parameter, "exp_avg") for parameter in trained]
    assert all(moment is not None and bool(moment.any()) for moment in moments)  # of the second engine, not the first
    return losses, whole_state(second), sorted(second.strategy.masters)


CASES = [
    (2, False, {}, "blocks.0"),
    (3, False, {}, ""),
    (3, True, OFFLOADED, ""),
    pytest.param(1, False, {}, "", marks=pytest.mark.full),
    pytest.param(3, False, {}, "blocks.0", marks=pytest.mark.full),
    pytest.param(2, True, {}, "", marks=pytest.mark.full),
    pytest.param(3, False, {**OFFLOADED, "offload_param": {"device": "cpu"}}, "", marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16", "zero", "frozen"), CASES)
def test_a_second_engine_trains_on_from_the_first(stage: int, bf16: bool, zero: dict[str, Any], frozen: str) -> None:
    expected = run_ranks(train_in_phases, 2, 0, bf16, {}, frozen)  # replicated
    found = run_ranks(train_in_phases, 2, stage, bf16, zero, frozen)
    for (losses, state, trained), (wanted, whole, names) in zip(found, expected, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-2 if bf16 else 1e-5)
        assert trained == names
        for name, tensor in whole.items():
            torch.testing.assert_close(state[name], tensor, rtol=2e-2, atol=2e-3 if bf16 else 1e-6)


def refuse(world: World) -> dict[str, str]:
    found = {}

    def expect(about: str, net: nn.Module, stage: int, **config: Any) -> None:
        with pytest.raises(UsageError) as caught:
            dsjob.initialize(model=net, config=make_config(stage, **config))
        found[about] = caught.value.message

    net = build_net()
    make_engine(2, net=net)
    expect("stage", net, 3)
    expect("precision", net, 2, bf16=True)
    expect("part", nn.Sequential(net, nn.Linear(2, 2)), 2)
    net.register_parameter("late", nn.Parameter(torch.ones(2)))
    expect("parameters", net, 2)
    section = {"zero_optimization": {"stage": 2, **OFFLOADED}}
    net = build_net()
    make_engine(2, net=net, **section)
    next(net.parameters()).requires_grad_(False)
    expect("frozen", net, 2, **section)
    return found


def test_a_model_that_cannot_stay_as_it_is_sharded_is_refused() -> None:
    earlier = "the model is already sharded by an earlier engine, "
    for found in run_ranks(refuse, 2):
        assert found == {
            "stage": f"{earlier}and cannot be given to a new one with another zero_optimization",
            "precision": f"{earlier}and cannot be given to a new one with another precision",
            "part": "the model, or a part of it, is already sharded by another engine",
            "parameters": f"{earlier}and cannot be given to a new one with other parameters",
            "frozen": f"{earlier}which trained other parameters",
        }
