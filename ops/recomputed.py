"""Parts of a transformer layer that save less for the backward pass, and compute the rest again.

Each gives the same results as torch's operators, and draws the same random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def norm_invertibly(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` over the last dimension, which saves its output instead of its input.

    A layer that multiplies the output by a matrix saves it anyway, so this costs no memory for x. The backward pass
    rebuilds the normalised input as (output - bias) / weight. Its rounding error is that of the output times
    |output / weight|: gradients get inaccurate where a weight is tiny, and a weight of exactly 0 gets no gradient.

    x: [..., features]. weight, bias: [features]. All have one dtype. No second derivatives.
    """
    out: Tensor = _InvertibleNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return out


class _InvertibleNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out = F.layer_norm(x, weight.shape, weight, bias, eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        slope = torch.rsqrt(x.to(wide).var(-1, correction=0, keepdim=True) + eps)
        ctx.save_for_backward(out, slope, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        out, slope, weight, bias = ctx.saved_tensors
        wide, low = slope.dtype, out.dtype
        scale, to_out = weight.to(wide), gradient.to(wide)
        normal = torch.where(scale == 0, 0, (out.to(wide) - bias.to(wide)) / scale)
        to_normal = to_out * scale
        mean = to_normal.mean(-1, keepdim=True)
        to_x = slope * (to_normal - mean - normal * (to_normal * normal).mean(-1, keepdim=True))
        to_weight, to_bias = ((to_out * factor).flatten(0, -2).sum(0).to(low) for factor in (normal, 1))
        return to_x.to(low), to_weight, to_bias, None


def project_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`F.linear(F.gelu(x, approximate="tanh"), weight, bias)`, which saves x, but not the output of GELU.

    x: [..., features]. weight: [outputs, features]. bias: [outputs]. All have one dtype.
    """
    out: Tensor = _ProjectGelu.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _ProjectGelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x, approximate="tanh"), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = torch.ops.aten.gelu_backward(gradient @ weight, x, approximate="tanh")
        rows = gradient.flatten(0, -2)
        to_weight = rows.t() @ F.gelu(x, approximate="tanh").flatten(0, -2)
        return to_x, to_weight, rows.sum(0)


def drop(x: Tensor, ratio: float) -> Tensor:
    """`F.dropout(x, ratio)`, which saves a mask of one byte for each element, also on a CPU.

    There, F.dropout saves a mask in the dtype of x. ratio: above 0 and below 1.
    """
    return torch.native_dropout(x, ratio, True)[0]


def multiply_dropped(probabilities: Tensor, values: Tensor, ratio: float) -> Tensor:
    """`drop(probabilities, ratio) @ values`, which saves the probabilities and a mask of one byte for each.

    torch would also save the result of the dropout. probabilities: [..., queries, keys]. values: [..., keys, features].
    Both have one dtype. ratio: above 0 and below 1.
    """
    out: Tensor = _MultiplyDropped.apply(probabilities, values, ratio)  # type: ignore[no-untyped-call]
    return out


class _MultiplyDropped(Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, values: Tensor, ratio: float) -> Tensor:
        dropped, kept = torch.native_dropout(probabilities, ratio, True)
        ctx.save_for_backward(probabilities, values, kept)
        ctx.scale = 1 / (1 - ratio)
        return dropped @ values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, values, kept = ctx.saved_tensors
        dropped = probabilities * kept * ctx.scale
        to_probabilities = (gradient @ values.transpose(-1, -2)) * kept * ctx.scale
        return to_probabilities, dropped.transpose(-1, -2) @ gradient, None
