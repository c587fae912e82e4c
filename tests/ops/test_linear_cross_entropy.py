"""linear_cross_entropy against torch's linear layer and cross entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dsjob.ops import linear_cross_entropy as home
from dsjob.ops.linear_cross_entropy import linear_cross_entropy


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one shorter."""
    monkeypatch.setattr(home, "_NARROWEST", 8)
    monkeypatch.setattr(home, "_CHUNK", {"cpu": 16})


def draw(rows: int = 13, features: int = 5, classes: int = 37, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, weight, bias (with gradients) and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, features), (classes, features), (classes,))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    target = torch.randint(classes, (rows,), generator=generator)
    target[::4] = -100
    return [*(leaf.requires_grad_() for leaf in leaves), target]


def refer(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    """What the op computes, by torch's operators."""
    softcap, classes = options.pop("softcap", None), options.pop("classes", None)
    logits = F.linear(hidden, weight, bias)[..., :classes].to(torch.promote_types(hidden.dtype, torch.float32))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    return losses.view(target.shape) if options.get("reduction") == "none" else losses


def differentiate(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    slope = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, slope)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"reduction": "none", "softcap": 2.0},
        {"classes": 30, "ignore_index": 3},
        {"label_smoothing": 1.0, "softcap": 1.5, "classes": 33},
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)],
)
def test_it_is_the_cross_entropy_of_a_linear_layer(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, bias, target = draw(dtype=dtype)
    target = target.where((target < options.get("classes", 37)) & (target >= 0), options.get("ignore_index", -100))
    found = differentiate(linear_cross_entropy(hidden, weight, target, bias, **options), hidden, weight, bias)
    expected = differentiate(refer(hidden, weight, bias, target, **options), hidden, weight, bias)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "softcap": 3.0, "classes": 30, "reduction": "sum"}])
def test_gradients_are_those_of_finite_differences(options: dict[str, Any]) -> None:
    *leaves, target = draw(rows=5)
    target = target.clamp(max=29)
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, target, b, **options), leaves)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["a logit", "all logits", "an ignored row"])
def test_what_is_not_finite_stays_so(bad: float, place: str) -> None:
    hidden, weight, bias, target = draw()
    with torch.no_grad():
        if place == "a logit":
            bias[20] = bad
        elif place == "all logits":
            bias.fill_(bad)
        else:
            hidden[0] = bad
    found = differentiate(linear_cross_entropy(hidden, weight, target, bias), hidden, weight, bias)
    expected = differentiate(refer(hidden, weight, bias, target), hidden, weight, bias)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_targets_it_is_as_in_torch(rows: int, reduction: str) -> None:
    hidden, weight, bias, target = draw(rows)
    target[:] = -100
    found = differentiate(linear_cross_entropy(hidden, weight, target, bias, reduction=reduction), hidden, weight)
    expected = differentiate(refer(hidden, weight, bias, target, reduction=reduction), hidden, weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_leading_dimensions_and_strides_are_free() -> None:
    hidden, weight, _, target = draw(rows=12)
    hidden = hidden.detach().view(3, 4, 5).transpose(0, 1).requires_grad_()
    weight = weight.detach().t().contiguous().t().requires_grad_()
    target = target.view(3, 4).t()
    found = differentiate(linear_cross_entropy(hidden, weight, target), hidden, weight)
    for one, other in zip(found, differentiate(refer(hidden, weight, None, target), hidden, weight), strict=True):
        torch.testing.assert_close(one, other)


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    hidden, weight, bias, target = draw()
    loss = linear_cross_entropy(hidden, weight.detach(), target, bias.detach())
    with FlopCounterMode(display=False) as counter:
        (gradient,) = torch.autograd.grad(loss, hidden)
    assert counter.get_total_flops() == 2 * 2 * hidden.numel() * weight.shape[0]  # logits again, and hidden
    expected = refer(hidden, weight.detach(), bias.detach(), target)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden)[0])


def test_autocast_lowers_its_operands() -> None:
    hidden, weight, bias, target = draw(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, bias)
        expected = F.cross_entropy(F.linear(hidden, weight, bias).float(), target)
    found = differentiate(loss, hidden, weight, bias)
    for one, other in zip(found, differentiate(expected, hidden, weight, bias), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_a_loss_scale_keeps_small_gradients_of_fp16() -> None:
    """Gradients computed before the scale is known would be zero."""
    hidden, weight, _, target = draw(rows=13, dtype=torch.float16)
    weight.data *= 1e-4
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target) * 2.0**16, hidden)
    (expected,) = torch.autograd.grad(refer(hidden.double(), weight.double(), None, target) * 2.0**16, hidden)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-3)


def test_a_graph_can_be_used_twice() -> None:
    hidden, weight, _, target = draw()
    loss = linear_cross_entropy(hidden, weight, target)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("biased", [True, False])
def test_torch_accepts_the_op(biased: bool) -> None:
    hidden, weight, bias, target = draw(dtype=torch.float32)
    arguments = (hidden, weight, bias if biased else None, target, 30, -100, 0.1, 2.0)
    target.clamp_(max=29)
    found = torch.library.opcheck(torch.ops.dsjob.linear_cross_entropy.default, arguments)
    assert set(found.values()) == {"SUCCESS"}


def test_the_compiler_traces_it() -> None:
    hidden, weight, bias, target = draw(dtype=torch.float32)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    found = differentiate(compiled(hidden, weight, target, bias), hidden, weight, bias)
    for one, other in zip(found, differentiate(refer(hidden, weight, bias, target), hidden, weight, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_mistakes_are_named() -> None:
    hidden, weight, _, target = draw()
    with pytest.raises(IndexError, match="Target 37 is out of bounds"):
        linear_cross_entropy(hidden, weight, target.clamp(min=37))
    with pytest.raises(ValueError, match=r"the shapes do not fit: hidden \[13, 5\], weight \[37, 5\], target \[12\]"):
        linear_cross_entropy(hidden, weight, target[1:])
    with pytest.raises(ValueError, match="reduction is 'max'"):
        linear_cross_entropy(hidden, weight, target, reduction="max")
    with pytest.raises(ValueError, match=r"target is torch\.int32"):
        linear_cross_entropy(hidden, weight, target.int())
    with pytest.raises(ValueError, match="classes is 38: weight has 37 rows"):
        linear_cross_entropy(hidden, weight, target, classes=38)
