"""Callables are judged by what the loop calls, and only for what it passes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsjob.trust.signatures import find_misfits, find_role_misfits


class Helped:
    """Has a method `forward` that is none of the loop's business."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.forward(outputs)


class Loss(nn.Module):
    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.mean()


class Called(Loss):
    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.forward(outputs)


def _hook(loss: Loss) -> Loss:
    loss.register_forward_pre_hook(lambda _, given: given[:1])
    return loss


@pytest.mark.parametrize(
    "made",
    [
        Helped,
        Helped(),
        Called,
        Called(),
        _hook(Loss()),
        max,
        functools.partial(torch.add, alpha=2),
        lambda *given, **named: given,
        lambda outputs, batch, weight=1: outputs,
    ],
)
def test_what_can_be_called_as_the_loop_does_has_no_misfit(made: Any) -> None:
    assert find_role_misfits("shop.loss", "loss", made) == []


def test_a_compiled_function_has_no_misfit() -> None:
    # As a parameter of the test above, it would make every collection import inductor.
    compiled = torch.compile(lambda outputs, batch: outputs)
    assert find_role_misfits("shop.loss", "loss", compiled) == []


@pytest.mark.parametrize("made", [Loss, Loss(), lambda outputs: outputs, functools.partial(lambda a, b: a, 1)])
def test_what_takes_other_arguments_has_one(made: Any) -> None:
    (found,) = find_role_misfits("shop.loss", "loss", made)
    assert found.message == "shop.loss takes 1 positional argument, not 2"
    assert found.hint == "loss is called with (outputs, batch)"


def test_a_configuration_of_transformers_takes_settings_of_generation() -> None:
    made = pytest.importorskip("transformers").T5Config
    assert find_misfits("T5Config", made, 0, ["d_model", "decoder_start_token_id", "num_labels", "hidden_size"]) == []
    (misfit,) = find_misfits("T5Config", made, 0, ["decoder_start_tokn_id"])
    assert misfit.hint == 'did you mean "decoder_start_token_id"?'
