"""The cross entropy of a linear layer's outputs, without ever holding all of these outputs (logits).

A forward pass computes the logits of one chunk of the vocabulary after the other, and keeps their logarithmic sums of
exponentials. The backward pass computes each chunk again. So the loss needs no memory in proportion to rows times
vocabulary, but a third more multiplications than torch's: it saves memory, not time. The gradient of each weight is one
product over all rows, accumulated in fp32 as in torch.

Recent versions of torch have `torch.nn.functional.linear_cross_entropy` with chunks of rows. That one computes the
gradients in the forward pass, where the loss scale of fp16 is not known yet, and has to add up the weight's gradient in
its own dtype or in a buffer of its size. torch.compile cannot trace it, and it has no chunks with label smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd
from torch.utils.flop_counter import register_flop_formula

from dsjob.torch_private import assert_on_device

_CHUNK = {"cpu": 1 << 21}  # logits of a chunk; on other devices _LARGE
_LARGE = 1 << 26
_NARROWEST = 256  # classes of a chunk: narrower products are slow


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    classes: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` in less memory: the logits are never held as a whole.

    hidden: [..., features]. weight: [rows, features]. bias: [rows]. They have one dtype; under autocast, they are cast
    to its dtype first, unless they are fp64. target: int64 with the shape of `hidden` without its last dimension;
    `ignore_index` marks positions that do not count. label_smoothing, reduction (`mean`, `sum` or `none`): as in
    `torch.nn.functional.cross_entropy`. softcap: logits are softcap * tanh(logits / softcap). classes: only this many
    rows of `weight` are classes, the others are padding.

    Returns the loss in fp32, or fp64 for fp64 inputs: a scalar, or a value for each target with reduction `none`.
    Raises ValueError for an argument that does not fit, and on the CPU IndexError for a target that is not a class.
    """
    _check(hidden, weight, target, reduction, classes)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:  # which autocast leaves alone
        low = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(low), weight.to(low)
        bias = None if bias is None else bias.to(low)
    labels = target.reshape(-1)
    classes = weight.shape[0] if classes is None else classes
    losses: Tensor
    losses, _ = _compute(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels, classes, ignore_index, label_smoothing, softcap
    )
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (labels != ignore_index).sum() if reduction == "mean" else total


def _check(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str, classes: int | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: expected mean, sum or none")
    if hidden.shape[:-1] != target.shape or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, target {list(target.shape)}"
        raise ValueError(f"the shapes do not fit: {shapes}; expected [..., features], [classes, features] and [...]")
    if target.dtype != torch.int64:
        raise ValueError(f"target is {target.dtype}: expected torch.int64")
    if classes is not None and not 0 < classes <= weight.shape[0]:
        raise ValueError(f"classes is {classes}: weight has {weight.shape[0]} rows")


def _wide(hidden: Tensor) -> torch.dtype:
    """The dtype of losses, and of sums."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _divide(hidden: Tensor, classes: int) -> Iterator[slice]:
    """The chunks of the vocabulary."""
    logits = _CHUNK.get(hidden.device.type, _LARGE)
    size = max(_NARROWEST, logits // max(hidden.shape[0], 1))
    return (slice(start, min(start + size, classes)) for start in range(0, classes, size))


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Logits [rows, classes of a chunk] in the wide dtype, after the rounding that torch.nn.Linear applies."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_wide(hidden))
    # The product is a tensor of its own, so it may change in place.
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _locate(target: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in a chunk, bool [rows]; and their columns in it, int64 [rows, 1], any one for the others."""
    inside = (target >= chunk.start) & (target < chunk.stop)
    return inside, (target - chunk.start).clamp(0, chunk.stop - chunk.start - 1).unsqueeze(1)


@custom_op("dsjob::linear_cross_entropy", mutates_args=())
def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, 0 where it is ignored, and the logarithm of its sum of exponentials, both [rows]."""
    _require_classes(target, classes, ignore_index)
    rows, wide = hidden.shape[0], _wide(hidden)
    log_sum = torch.full((rows,), -torch.inf, dtype=wide, device=hidden.device)
    chosen, total = (torch.zeros(rows, dtype=wide, device=hidden.device) for _ in range(2))
    with torch.autocast(hidden.device.type, enabled=False):  # the inputs are cast already
        for chunk in _divide(hidden, classes):
            logits = _project(hidden, weight[chunk], None if bias is None else bias[chunk], softcap)
            inside, column = _locate(target, chunk)
            chosen = torch.where(inside, logits.gather(1, column).squeeze(1), chosen)
            if label_smoothing:
                total += logits.sum(1)
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
    # With an infinite logit, the softmax is not defined: torch's loss is NaN.
    log_sum = log_sum.masked_fill(log_sum == torch.inf, torch.nan)
    losses = log_sum - chosen
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (log_sum - total / classes)
    return losses.masked_fill(target == ignore_index, 0), log_sum


@_compute.register_fake
def _(hidden: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
    return rows, torch.empty_like(rows)


@custom_op("dsjob::linear_cross_entropy_backward", mutates_args=())
def _differentiate(
    slope: Tensor,
    log_sum: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias, each empty unless it is `wanted`. slope: of each row's loss, [rows]."""
    wide = _wide(hidden)
    slope = slope.to(wide).masked_fill(target == ignore_index, 0)
    to_hidden = torch.zeros_like(hidden, dtype=wide) if wanted[0] else hidden.new_empty(0)
    to_weight, to_bias = _allocate(weight, wanted[1]), _allocate(weight[:, 0] if bias is None else bias, wanted[2])
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in _divide(hidden, classes):
            logits = _project(hidden, weight[chunk], None if bias is None else bias[chunk], softcap)
            bend = None if softcap is None else (logits / softcap).square_().neg_().add_(1)
            inside, column = _locate(target, chunk)
            # In place from here on: softmax - target, times the slope of the row.
            logits.sub_(log_sum.unsqueeze(1)).exp_()
            if label_smoothing:
                logits.sub_(label_smoothing / classes)
            logits.mul_(slope.unsqueeze(1))
            logits.scatter_add_(1, column, torch.where(inside, (label_smoothing - 1) * slope, 0).unsqueeze(1))
            if bend is not None:
                logits.mul_(bend)
            if wanted[2]:
                to_bias[chunk] = logits.sum(0)
            low = logits.to(hidden.dtype)
            if wanted[0]:
                _add_product(to_hidden, low, weight[chunk])
            if wanted[1]:
                torch.mm(low.t(), hidden, out=to_weight[chunk])
    for gradient in (to_weight[classes:], to_bias[classes:]):
        gradient.zero_()
    return to_hidden.to(hidden.dtype), to_weight, to_bias


@_differentiate.register_fake
def _(
    slope: Tensor, log_sum: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted: list[bool] = rest[-1]
    of_hidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
    return of_hidden, _allocate(weight, wanted[1]), _allocate(weight[:, 0] if bias is None else bias, wanted[2])


def _allocate(like: Tensor, wanted: bool) -> Tensor:
    return like.new_empty(like.shape if wanted else 0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, which may be wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _require_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    valid = ((target >= 0) & (target < classes)) | (target == ignore_index)
    if target.device.type != "cpu":
        assert_on_device(valid.all())
    elif not valid.all():
        raise IndexError(f"Target {int(target[~valid][0])} is out of bounds.")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, target, *options = inputs
    ctx.save_for_backward(hidden, weight, bias, target, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.options = options


def _backward(ctx: Any, slope: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, target, log_sum = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    found = _differentiate(slope, log_sum, hidden, weight, bias, target, *ctx.options, wanted)
    gradients = [gradient if needed else None for gradient, needed in zip(found, wanted, strict=True)]
    return (*gradients, None, None, None, None, None)


register_autograd("dsjob::linear_cross_entropy", _backward, setup_context=_keep)


@register_flop_formula(torch.ops.dsjob.linear_cross_entropy)
def _count_forward(hidden: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * hidden.numel() * weight[0]


@register_flop_formula(torch.ops.dsjob.linear_cross_entropy_backward)
def _count_backward(
    slope: torch.Size, log_sum: torch.Size, hidden: torch.Size, weight: torch.Size, *rest: Any, **__: object
) -> int:
    wanted: list[bool] = rest[-1]
    return 2 * hidden.numel() * weight[0] * (1 + wanted[0] + wanted[1])
