"""The optimizer that `deepspeed.initialize` returns has what libraries read from DeepSpeed's wrapper of it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from engines import make_deepspeed_engine
from ranks import run_ranks
from torch import nn

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.runtime.zero import unwrap_model_for_generation
from dsjob.ranks.mesh import World


def _step(engine: Any, value: float) -> None:
    engine.backward(engine(torch.full((2, 4), value)).mean())
    engine.step()


def test_an_optimizer_says_whether_fp16_overflowed_as_accelerate_asks() -> None:
    engine = make_deepspeed_engine(0, net=nn.Linear(4, 1), fp16={"enabled": True, "initial_scale_power": 8})
    optimizer: Any = engine.optimizer
    said = [optimizer.overflow]
    for value in (1.0, float("inf"), 1.0):
        _step(engine, value)
        said.append(optimizer.overflow)
    assert said == [False, False, True, False]


def test_an_optimizer_without_loss_scale_has_no_overflow() -> None:
    assert not hasattr(make_deepspeed_engine(0, net=nn.Linear(4, 1)).optimizer, "overflow")


def _generate_as_trl(world: World) -> list[list[float]]:
    """Removes DeepSpeed's hooks, calls the model, and registers them again: `trl/models/utils.py` (1.16)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine = make_deepspeed_engine(3, net=net)
    _step(engine, 1.0)
    batch = torch.ones(2, 4)
    with torch.no_grad():
        outputs = [engine(batch)]
        with deepspeed.zero.GatheredParameters(engine.parameters()):
            optimizer: Any = engine.optimizer
            hooks = optimizer.parameter_offload
            whole = itertools.chain(hooks.module.named_parameters(recurse=True), hooks.module.ds_external_parameters())
            for _, parameter in whole:
                parameter.ds_active_sub_modules.clear()
            for hook in [*hooks.forward_hooks, *hooks.backward_hooks]:
                hook.remove()
            hooks.forward_hooks, hooks.backward_hooks = [], []
            outputs.append(engine.module(batch))
            hooks._register_deepspeed_module(hooks.module)
        with unwrap_model_for_generation(engine) as model:
            assert net[0].weight.shape == (8, 4)
            assert type(net[0].weight + 0) is torch.Tensor
            outputs.append(model(batch))
    _step(engine, 1.0)
    with torch.no_grad():
        outputs.append(engine(batch))
    return [output.flatten().tolist() for output in outputs]


def test_trl_generates_with_a_sharded_model_and_trains_on() -> None:
    for before, inside, unwrapped, trained in run_ranks(_generate_as_trl, 2):
        assert before == inside == unwrapped
        assert trained != before
