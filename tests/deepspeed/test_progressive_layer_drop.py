"""`progressive_layer_drop` tells the model in training how many layers to keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engines import make_deepspeed_engine
from torch import Tensor, nn

from dsjob.errors import ConfigError


class Noting(nn.Module):
    """Notes the keyword arguments of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(4, 1), []

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        self.given.append(given)
        return self.layer(x)


def test_a_model_in_training_gets_the_share_of_its_step() -> None:
    net = Noting()
    section = {"enabled": True, "theta": 0.25, "gamma": 0.5}
    engine = make_deepspeed_engine(0, net=net, accumulation=2, progressive_layer_drop=section)
    assert (engine.pld_enabled(), engine.get_pld_theta()) == (True, 1.0)
    for _ in range(6):
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    engine.eval()
    engine(torch.ones(2, 4))
    # As in DeepSpeed, the share of a step holds from the step after it.
    shares = [1.0, 1.0, 1.0, 1.0, *[0.75 * math.exp(-0.5) + 0.25] * 2]
    assert net.given == [*({"progressive_layer_drop": True, "pld_theta": share} for share in shares), {}]
    assert engine.get_pld_theta() == 0.75 * math.exp(-1.0) + 0.25


def test_without_the_section_a_model_gets_nothing_and_a_wrong_share_is_an_error() -> None:
    engine = make_deepspeed_engine(0, net=nn.Linear(4, 1))
    assert engine.get_pld_theta() is None
    engine(torch.ones(2, 4))
    with pytest.raises(ConfigError, match=r"theta: must be at most 1, but is 2"):
        make_deepspeed_engine(0, net=nn.Linear(4, 1), progressive_layer_drop={"enabled": True, "theta": 2})
