"""An engine is a module, as in DeepSpeed: it can be moved and hooked, and be a part of another module."""

from __future__ import annotations

from typing import Any

import pytest
from engines import build_net, make_config, make_deepspeed_engine, make_tokens
from torch import Tensor, nn

import dsjob.deepspeed as deepspeed
from dsjob.errors import UsageError


def _train(engine: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        tokens, labels = make_tokens(step, 2)
        losses.append(engine.backward(engine(tokens, labels)).item())
        engine.step()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_names_of_parameters_and_state_begin_with_module(stage: int) -> None:
    engine = make_deepspeed_engine(stage)
    assert isinstance(engine, nn.Module)
    assert [name for name, _ in engine.named_children()] == ["module"]
    own = [name for name, _ in engine.module.named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name in own]
    whole = engine.module.state_dict()
    assert {name.removeprefix("module."): value.shape for name, value in engine.state_dict().items()} == {
        name: value.shape for name, value in whole.items()
    }


def test_methods_that_return_the_module_return_the_engine() -> None:
    engine = make_deepspeed_engine(0)
    assert engine.to("cpu") is engine.apply(lambda module: None) is engine.requires_grad_(True) is engine
    assert _train(engine) == _train(make_deepspeed_engine(0))


def test_an_engine_follows_the_mode_of_the_module_that_it_is_part_of() -> None:
    engine = make_deepspeed_engine(0)
    outer = nn.Module()
    outer.policy = engine
    outer.eval()
    assert not engine.training
    assert not engine.module.training
    outer.train()
    assert engine.module.training
    assert "policy.module" in dict(outer.named_modules())


def test_hooks_on_the_engine_are_called_and_own_parts_are_found() -> None:
    engine = make_deepspeed_engine(0)
    seen: list[Tensor] = []
    engine.register_forward_hook(lambda module, args, output: seen.append(output))
    engine.probe = nn.Linear(2, 2)
    assert isinstance(engine.probe, nn.Linear)
    loss = engine(*make_tokens(0, 2))
    assert seen[0] is loss
    assert engine.blocks is engine.module.blocks  # of the model


def test_the_model_of_an_engine_stays_and_an_engine_is_no_model_of_another_one() -> None:
    engine = make_deepspeed_engine(0)
    with pytest.raises(UsageError, match=r"engine\.module cannot be replaced"):
        engine.module = build_net()
    with pytest.raises(UsageError, match="got an engine as its model"):
        deepspeed.initialize(model=engine, config=make_config(0))
