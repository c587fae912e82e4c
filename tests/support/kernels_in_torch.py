"""What the kernels of the transformer layer compute, in torch's operators: stand-ins on a CPU, by name."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten.gelu_backward(gradient, x + bias, approximate="tanh")
    return found, found.sum(0)


def norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, ratio: float, eps: float,
    invertible: bool, with_sum: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    kept = torch.rand(x.shape) >= ratio if ratio else torch.empty(0)
    z = residual + (x + bias) * (kept / (1 - ratio) if ratio else 1)
    mean, slope = z.mean(1), (z.var(1, correction=0) + eps).rsqrt()
    y = F.layer_norm(z, z.shape[1:], weight, norm_bias, eps)
    return (
        y,
        z if with_sum or not invertible else x.new_empty(0),
        kept.byte(),
        (x.new_empty(0) if invertible else mean).float(),
        slope.float(),
    )


def norm_backward(
    gradient: Tensor, added: Tensor | None, z_or_y: Tensor, weight: Tensor, norm_bias: Tensor, mean: Tensor,
    slope: Tensor, kept: Tensor, ratio: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    normal = (z_or_y - mean[:, None]) * slope[:, None] if mean.numel() else (z_or_y - norm_bias) / weight
    inner = gradient * weight
    found = slope[:, None] * (inner - inner.mean(1, True) - normal * (inner * normal).mean(1, True))
    found = found if added is None else found + added
    to_x = found * kept / (1 - ratio) if ratio else found.new_empty(0)
    summed = to_x if ratio else found
    return found, to_x, (gradient * normal).sum(0), gradient.sum(0), summed.sum(0)


def softmax(scores: Tensor, mask: Tensor | None, scale: float, ratio: float) -> tuple[Tensor, ...]:
    probabilities = (scores * scale + (0 if mask is None else mask)).softmax(-1)
    kept = torch.rand(scores.shape) >= ratio
    return probabilities * kept / (1 - ratio), probabilities, kept.byte()


def softmax_backward(
    gradient: Tensor, probabilities: Tensor, kept: Tensor, scale: float, ratio: float, with_dropped: bool
) -> tuple[Tensor, ...]:
    slope = gradient * kept / (1 - ratio)
    found = scale * probabilities * (slope - (slope * probabilities).sum(-1, True))
    return found, probabilities * kept / (1 - ratio) if with_dropped else found.new_empty(0)


IN_TORCH = {
    "bias_gelu": lambda x, bias: F.gelu(x + bias, approximate="tanh"),
    "bias_gelu_backward": gelu_backward,
    "drop_add_norm": norm,
    "drop_add_norm_backward": norm_backward,
    "softmax_drop": softmax,
    "softmax_drop_backward": softmax_backward,
}
