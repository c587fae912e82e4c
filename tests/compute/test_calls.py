"""How a batch goes into a model, and where its loss is found."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsjob.compute.calls import call_model, find_loss
from dsjob.errors import ContractError

LOSS = torch.tensor(2.0, requires_grad=True)


def spell(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


@pytest.mark.parametrize(
    ("batch", "expected"),
    [({"x": 1}, ((), {"x": 1})), ((1, 2), ((1, 2), {})), ([1, 2], ((1, 2), {})), (7, ((7,), {}))],
)
def test_batches_become_keywords_or_positions(batch: Any, expected: Any) -> None:
    assert call_model(spell, batch) == expected


@pytest.mark.parametrize(
    "outputs",
    [LOSS, LOSS.reshape(1), {"loss": LOSS, "logits": 1}, (LOSS, 1), [LOSS], SimpleNamespace(loss=LOSS)],
)
def test_the_loss_is_found_in_every_form_of_output(outputs: Any) -> None:
    found = find_loss(outputs, None, None).mean
    assert found.shape == ()
    assert found.item() == 2.0


def test_a_loss_function_is_given_outputs_and_batch() -> None:
    assert find_loss(LOSS, 3.0, lambda outputs, batch: outputs * batch).mean.item() == 6.0


@pytest.mark.parametrize("count", [8, 8.0, torch.tensor(8), torch.tensor([8])])
def test_a_loss_function_may_give_a_sum_and_a_count(count: Any) -> None:
    found = find_loss(LOSS, None, lambda outputs, batch: (outputs * 4, count))
    assert (found.value.item(), found.count, found.mean.item()) == (8.0, torch.tensor(8.0, dtype=torch.float64), 1.0)


@pytest.mark.parametrize(
    ("outputs", "function", "message"),
    [
        ({"logits": LOSS}, None, "it is a dict of logits"),
        ((), None, "is tuple, not a loss"),
        ("text", None, "is str, not a loss"),
        (torch.zeros(2, requires_grad=True), None, r"shape \[2\], not a scalar"),
        (torch.zeros(()), None, "does not depend on any trainable parameter"),
        (LOSS, lambda outputs, batch: 1.5, "the loss function .* returned float"),
        (LOSS, lambda outputs, batch: (1.5, 2), "the loss function .* returned a pair, whose first element is float"),
        (
            LOSS,
            lambda outputs, batch: (LOSS, torch.zeros(3)),
            r"whose second element is a tensor of shape \[3\], not a",
        ),
    ],
)
def test_what_is_no_loss_is_named(outputs: Any, function: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        find_loss(outputs, None, function)


def test_an_evaluation_needs_no_gradient() -> None:
    with torch.no_grad():
        found: Tensor = find_loss(torch.zeros(()), None, None).mean
    assert found.item() == 0.0


class Takes(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x + y  # a TypeError of its own where they are no numbers


@pytest.mark.parametrize(
    ("batch", "told", "hint"),
    [
        (
            {"inputs": 1, "y": 2},
            "missing a required argument: 'x'",
            "forward takes x, y; the batch, a dict, is passed as ",
        ),
        ({}, "missing a required argument: 'x'", "the batch, a dict, is passed as keywords: none"),
        ((1, 2, 3), "too many positional arguments", "the batch, a tuple, is passed by position, here 3"),
        (1, "missing a required argument: 'y'", "the batch, a int, is passed by position, here 1"),
    ],
)
def test_a_batch_that_forward_does_not_take_is_told_with_both(batch: Any, told: str, hint: str) -> None:
    with pytest.raises(ContractError, match=told) as caught:
        call_model(Takes(), batch)
    assert hint in caught.value.hint


def test_a_type_error_of_the_models_own_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        call_model(Takes(), {"x": 1, "y": "2"})
