"""Optimizers by DeepSpeed's names, with DeepSpeed's meaning."""

from typing import Any

import pytest
import torch
from torch import nn

from dsjob.contract import schema
from dsjob.contract.spec import Method, Target
from dsjob.errors import TargetError
from dsjob.optim import build_optimizer
from dsjob.trust.grant import Trust


def make(kind: str, **params: Any) -> torch.optim.Optimizer:
    section = schema.job_schema()["properties"]["optimizer"]
    full = schema.fill_defaults(params, schema.params_schema(section, kind) or {})
    return build_optimizer(Method(type=kind, params=full, target=None), [nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("AdamW", {}, torch.optim.AdamW),
        ("adamw", {"adam_w_mode": False}, torch.optim.AdamW),
        ("Adam", {}, torch.optim.AdamW),
        ("adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW),
        ("SGD", {"momentum": 0.9}, torch.optim.SGD),
        ("Adagrad", {}, torch.optim.Adagrad),
        ("adagrad", {"lr_decay": 0.1}, torch.optim.Adagrad),
        ("RMSprop", {"alpha": 0.5}, torch.optim.RMSprop),
        ("Adafactor", {}, torch.optim.Adafactor),
    ],
)
def test_names_mean_what_they_mean_in_deepspeed(kind: str, params: dict[str, Any], expected: type) -> None:
    assert type(make(kind, **params)) is expected


def test_adamw_has_deepspeeds_defaults() -> None:
    group = make("AdamW").param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 0)


def test_a_target_is_called_with_the_parameters() -> None:
    target = Target(path="torch.optim.Adagrad", arguments={"lr": 0.5})
    built = build_optimizer(Method(type=None, params={}, target=target), [nn.Parameter(torch.ones(3))])
    assert isinstance(built, torch.optim.Adagrad)
    assert built.param_groups[0]["lr"] == 0.5


def test_what_cannot_be_built_is_named() -> None:
    with pytest.raises(TargetError, match="unknown optimizer 'AdamX'") as caught:
        make("AdamX")
    assert "AdamW" in caught.value.hint
    with pytest.raises(TargetError, match="alfa"):
        make("RMSprop", alfa=1)
    method = Method(type=None, params={}, target=Target("builtins.list", {}))
    with pytest.raises(TargetError, match="returned list, not"):
        build_optimizer(method, [nn.Parameter(torch.ones(3))], Trust(prefixes=("builtins",)))
