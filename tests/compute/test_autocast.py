"""Which modules are safe to have their gradients travel low, and what DeepSpeed's names say of an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import ADAMW, build_net, make_deepspeed_engine, make_engine, make_tokens
from net import Net
from torch import nn

import dsjob
from dsjob.compute.autocast import find_safe_modules
from dsjob.deepspeed.runtime.torch_autocast import (
    get_autocast_dtype,
    get_default_autocast_lower_precision_modules,
    has_autocast_dtype,
    init_autocast_params,
    is_autocast_initialized,
)
from dsjob.errors import ConfigError, TargetError, UsageError

BF16: dict[str, Any] = {"enabled": True, "dtype": "bfloat16"}


def name_modules(model: nn.Module, names: list[str] | None) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(module)] for module in find_safe_modules(model, names)]


def test_linear_and_convolution_layers_are_safe_by_default() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.LayerNorm(2), nn.Conv3d(1, 1, 1), nn.Embedding(2, 2))
    assert name_modules(model, None) == ["0", "1", "3"]
    assert name_modules(model, ["torch.nn.LayerNorm", "torch.nn.modules.sparse.Embedding"]) == ["2", "4"]
    assert name_modules(model, []) == []


def test_a_tied_parameter_travels_in_one_dtype() -> None:
    net = Net()
    assert "head" in name_modules(net, None)
    net.head.weight = net.emb.weight
    assert "head" not in name_modules(net, None)


@pytest.mark.parametrize("name", ["torch.nn.Linaer", "Linear", "torch.nn.functional.linear", "no.such.module", ""])
def test_a_name_that_is_no_class_is_refused_and_nothing_is_imported(name: str) -> None:
    with pytest.raises(TargetError, match="lower_precision_safe_modules"):
        make_engine(0, torch_autocast={**BF16, "lower_precision_safe_modules": [name]})


@pytest.mark.parametrize("name", ["bfloat16", "bf16", "torch.bfloat16"])
def test_the_engine_answers_under_deepspeeds_names(name: str) -> None:
    engine = make_engine(0, torch_autocast={"enabled": True, "dtype": name})
    assert is_autocast_initialized(engine)
    assert get_autocast_dtype(engine) == torch.bfloat16
    marked = {n for n, p in engine.module.named_parameters() if has_autocast_dtype(p)}
    assert marked == {n for n, _ in engine.module.named_parameters() if n.split(".")[-2] in ("fc", "proj", "head")}
    assert "torch.nn.modules.linear.Linear" in get_default_autocast_lower_precision_modules()
    plain = make_engine(0)
    assert not is_autocast_initialized(plain)
    assert not any(has_autocast_dtype(p) for p in plain.module.parameters())


@pytest.mark.parametrize(
    ("name", "dtype", "scaled"),
    [("half", torch.float16, True), (None, torch.bfloat16, False), ("fp32", None, False), ("torch.float", None, False)],
)
def test_the_dtype_by_its_names(name: str | None, dtype: torch.dtype | None, scaled: bool) -> None:
    engine = make_deepspeed_engine(0, torch_autocast={"enabled": True, **({"dtype": name} if name else {})})
    assert get_autocast_dtype(engine) == dtype
    assert engine.dynamic_loss_scale() == scaled


def test_autocast_on_one_rank_is_torchs_own_bit_for_bit() -> None:
    engine, net = make_engine(0, torch_autocast=BF16, gradient_clipping=0), build_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        x, y = make_tokens(step, 4)
        with torch.autocast("cpu", torch.bfloat16):
            expected = net(x, y)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = engine(x, y)
        assert loss.item() == expected.item()
        engine.backward(loss)
        engine.step()
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}


def test_the_config_decides_whatever_autocast_is_around_the_call() -> None:
    plain, low = make_engine(0), make_engine(0, torch_autocast=BF16)
    x, y = make_tokens(0, 4)
    exact, lowered = plain(x, y).item(), low(x, y).item()
    assert exact != lowered
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert (plain(x, y).item(), low(x, y).item()) == (exact, lowered)


def test_autocast_may_be_switched_on_afterwards_on_one_rank() -> None:
    late, early = make_engine(0), make_engine(0, torch_autocast=BF16)
    init_autocast_params(late, torch.bfloat16, ["torch.nn.Linear"])
    assert late(*make_tokens(0, 4)).item() == early(*make_tokens(0, 4)).item()
    with pytest.raises(UsageError):
        init_autocast_params(late, torch.float16)


def test_an_overflow_of_what_is_not_optimized_does_not_last() -> None:
    net = build_net()
    fp16, autocast = {"initial_scale_power": 4}, {"enabled": True, "dtype": "fp16"}
    config = {"train_batch_size": 4, "optimizer": ADAMW, "fp16": fp16, "torch_autocast": autocast}
    engine = dsjob.initialize(model=net, model_parameters=net.head.parameters(), config=config)[0]
    applied = []
    for factor in (1.0, float("inf"), 1.0):
        engine.backward(engine(*make_tokens(0, 4)) * factor)
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [True, False, True]


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_autocast_does_not_go_with_a_model_in_half_precision(section: str) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with"):
        make_engine(0, torch_autocast=BF16, **({"fp16": {"enabled": True}} if section == "fp16" else {"bf16": True}))
