"""The time of each CUDA kernel of the transformer layer that moves bytes rather than multiplies matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsjob.ops import fused as _registered  # noqa: F401 (defines torch.ops.dsjob.*)

Clock = Callable[[Callable[[], object]], float]
Call = Callable[[], object]
RATIO, EPS = 0.1, 1e-12


def time_kernels(shape: str, device: str, clock: Clock, rate: float) -> list[dict[str, Any]]:
    """For each kernel in bf16: milliseconds, beside torch's operators for the same, and the bytes that it has to move a
    second, as a share of `rate`. shape: batch, tokens, features, heads. On a CPU, only torch's operators run.
    """
    rows = []
    for name, (call, plain, size) in _list_kernels(shape, device).items():
        row: dict[str, Any] = {"shape": shape, "kernel": name, "torch_ms": 1e3 * clock(plain)}
        if device != "cpu":
            seconds = clock(lambda call=call: [call() for _ in range(10)]) / 10  # type: ignore[misc]
            row |= {"ms": 1e3 * seconds, "share_of_copies": size / seconds / rate}
        rows.append(row)
    return rows


def _list_kernels(shape: str, device: str) -> dict[str, tuple[Call, Call, int]]:
    """By name: the kernel, torch's operators, and the bytes that are read or written at least."""
    batch, tokens, width, heads = map(int, shape.split("x"))

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    ops: Any = torch.ops.dsjob
    wide, slope, bias = draw(batch * tokens, 4 * width), draw(batch * tokens, 4 * width), draw(4 * width)
    x, residual, gradient = (draw(batch * tokens, width) for _ in range(3))
    weight, shift = draw(width), draw(width)
    _, *saved = torch.native_layer_norm(x, (width,), weight, shift, EPS)  # mean and slope
    mean, scale = (each.float().flatten() for each in saved)
    kept = (torch.rand(x.shape, device=device) >= RATIO).byte()
    scores, to_scores = draw(batch, heads, tokens, tokens), draw(batch, heads, tokens, tokens)
    mask, flags = draw(batch, 1, 1, tokens), (torch.rand(scores.shape, device=device) >= RATIO).byte()
    chances = scores.softmax(-1)
    norm = (x, shift, residual, weight, shift, RATIO, EPS, False, False)
    back = (gradient, None, x, weight, shift, mean, scale, kept, RATIO)
    return {
        "bias_gelu": (
            lambda: ops.bias_gelu(wide, bias),
            lambda: F.gelu(wide + bias, approximate="tanh"),
            2 * wide.nbytes,
        ),
        "bias_gelu_backward": (
            lambda: ops.bias_gelu_backward(slope, wide, bias),
            lambda: torch.ops.aten.gelu_backward(slope, wide, approximate="tanh").sum(0),
            3 * wide.nbytes,
        ),
        "drop_add_norm": (
            lambda: ops.drop_add_norm(*norm),
            lambda: F.layer_norm(residual + F.dropout(x + shift, RATIO), (width,), weight, shift, EPS),
            4 * x.nbytes + kept.nbytes,
        ),
        # Two passes: one over the rows, and one down the columns.
        "drop_add_norm_backward": (
            lambda: ops.drop_add_norm_backward(*back),
            lambda: (
                torch.ops.aten.native_layer_norm_backward(
                    gradient, x, (width,), *saved, weight, shift, (True, True, True)
                )[0]
                * kept
            ),
            7 * x.nbytes + kept.nbytes,
        ),
        "softmax_drop": (
            lambda: ops.softmax_drop(scores, mask, 0.125, RATIO),
            lambda: F.dropout((scores * 0.125 + mask).softmax(-1), RATIO),
            3 * scores.nbytes + flags.nbytes,
        ),
        "softmax_drop_backward": (
            lambda: ops.softmax_drop_backward(to_scores, chances, flags, 0.125, RATIO, False),
            lambda: torch.ops.aten._softmax_backward_data(to_scores * flags, chances, -1, torch.bfloat16) * 0.125,
            3 * scores.nbytes + flags.nbytes,
        ),
    }
