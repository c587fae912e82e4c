"""Adam without bias correction: the closed form, whole and in shards."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from dsjob.ranks.mesh import World


def follow(weight: Tensor, gradients: list[Tensor], *, decoupled: bool, decay: float) -> Tensor:
    """The weight after these steps, with sums written out in place of running averages."""
    lr, (b1, b2), eps = 0.01, (0.9, 0.99), 1e-6
    used: list[Tensor] = []
    for gradient in gradients:
        used.append(gradient if decoupled else gradient + decay * weight)
        powers = range(len(used) - 1, -1, -1)
        first = sum((1 - b1) * b1**k * g for k, g in zip(powers, used, strict=True))
        second = sum((1 - b2) * b2**k * g * g for k, g in zip(powers, used, strict=True))
        update = first / (torch.as_tensor(second).sqrt() + eps)
        weight = weight - lr * (update + (decay * weight if decoupled else 0))
    return weight


def make(kind: str, groups: list[Any], *, corrects: bool, decoupled: bool) -> torch.optim.Adam:
    """An Adam of DeepSpeed's classes, whose arguments have different orders; given by place."""
    lr, betas, eps, decay = 0.01, (0.9, 0.99), 1e-6, 0.1
    if kind == "FusedAdam":
        return FusedAdam(groups, lr, corrects, betas, eps, decoupled, decay, False)
    return DeepSpeedCPUAdam(groups, lr, corrects, betas, eps, decay, False, decoupled)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kind", ["FusedAdam", "DeepSpeedCPUAdam"])
@pytest.mark.parametrize("in_group", [True, False])
def test_steps_are_those_of_the_closed_form(kind: str, decoupled: bool, in_group: bool) -> None:
    """`in_group`: another group of the same optimizer has bias correction, and takes the steps of torch's Adam."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(5)]
    weight, other, expected = (nn.Parameter(start.clone()) for _ in range(3))
    groups = [{"params": [other]}, {"params": [weight], "bias_correction": False}] if in_group else [weight]
    optimizer = make(kind, groups, corrects=in_group, decoupled=decoupled)
    torchs = torch.optim.Adam([expected], 0.01, (0.9, 0.99), 1e-6, 0.1, decoupled_weight_decay=decoupled)
    for gradient in gradients:
        for parameter in (weight, other, expected):
            parameter.grad = gradient.clone()
        optimizer.step()
        torchs.step()
    torch.testing.assert_close(weight.detach(), follow(start, gradients, decoupled=decoupled, decay=0.1))
    assert torch.equal(other, expected if in_group else start)


def test_what_a_program_asks_of_its_optimizer_holds_without_bias_correction() -> None:
    weight, asked = nn.Parameter(torch.ones(2)), []
    optimizer = DeepSpeedCPUAdam([weight], bias_correction=False)
    for kind in (DeepSpeedCPUAdam, FusedAdam, torch.optim.Adam):
        assert isinstance(optimizer, kind)
    optimizer = pickle.loads(pickle.dumps(optimizer))
    optimizer.register_step_post_hook(lambda *_: asked.append("step"))
    optimizer.add_param_group({"params": [weight]})
    assert [group["bias_correction"] for group in optimizer.param_groups] == [False, False]
    weight.grad = torch.ones(2)
    assert float(optimizer.step(lambda: torch.tensor(3.0))) == 3.0
    assert asked == ["step"]
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdam([weight], bias_correction=False, amsgrad=True)


def train(world: World, stage: int, offload: str, by: str = "config") -> Tensor:
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    params: dict[str, Any] = {"lr": 0.01, "betas": [0.9, 0.99], "bias_correction": False, "weight_decay": 0.1}
    zero = {"stage": stage, **({"offload_optimizer": {"device": offload}} if offload else {})}
    optimizer = {"type": "Adam", "params": params}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    if by == "config":
        engine = dsjob.initialize(model=net, config={**config, "optimizer": optimizer})[0]
    else:
        engine = dsjob.initialize(model=net, config=config, optimizer=FusedAdam(net.parameters(), **params))[0]
    generator = torch.Generator().manual_seed(world.data_rank)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 5, generator=generator)).square().mean())
        engine.step()
    return engine.module_state_dict()["weight"]


def train_stages(world: World) -> list[Tensor]:
    ways = [(0, ""), (1, ""), (2, "cpu"), (3, ""), (0, "", "program"), (2, "cpu", "program"), (3, "", "program")]
    return [train(world, *way) for way in ways]


def test_shards_take_the_steps_of_the_whole() -> None:
    for weights in run_ranks(train_stages, 2):
        for weight in weights[1:]:
            torch.testing.assert_close(weight, weights[0])


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [
        ("AdamW", {}, 0),
        ("AdamW", {"torch_adam": True}, 0.01),
        ("AdamW", {"torch_adam": True, "weight_decay": 0}, 0),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0),
    ],
)
def test_torchs_own_adam_has_torchs_default_weight_decay_as_in_deepspeed(
    kind: str, params: dict[str, Any], decay: float
) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": kind, "params": params}}
    engine, optimizer, *_ = dsjob.initialize(model=nn.Linear(2, 1), config=config)
    assert optimizer is not None
    assert optimizer.param_groups[0]["weight_decay"] == decay
    assert engine.config["optimizer"]["params"]["weight_decay"] == decay


@pytest.mark.parametrize("wide", [True, False])
def test_a_bf16_parameter_has_the_state_that_is_asked_for(wide: bool) -> None:
    low = torch.nn.Parameter(torch.linspace(-1, 1, 64).bfloat16())
    high = torch.nn.Parameter(low.detach().float())
    ours = DeepSpeedCPUAdam([low], lr=0.01, fp32_optimizer_states=wide)
    schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1.0)  # replaces `step`, too
    theirs = torch.optim.AdamW([high], lr=0.01, weight_decay=0.0)
    for seed in range(5):
        low.grad = torch.randn(64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        high.grad = low.grad.float()
        assert ours.step(lambda: 3) == 3
        schedule.step()
        theirs.step()
        high.data = high.data.bfloat16().float()
        assert {ours.state[low][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {
            torch.float32 if wide else torch.bfloat16
        }
        if wide:
            assert torch.equal(low.detach().float(), high.detach())
    assert torch.allclose(low.float(), high, atol=0.02)
