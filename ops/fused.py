"""Parts of the transformer layer as fused CUDA kernels.

They are bias + GELU, bias + dropout + residual + LayerNorm, and mask + softmax + dropout of attention scores.

Tensors have one dtype (fp32, fp16 or bf16); sums are fp32. x: [rows, width]. Weights and biases: [width]. The compiled
op implements `torch.ops.dsjob.*` on GPUs; here are their schemas, shapes and gradients. Dropout draws from torch's
generator of the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dsjob.ops.loading import load

_WIDEST = 12256  # elements of a row that fit into the shared memory of every GPU; see launch.h
_KINDS = (torch.float32, torch.float16, torch.bfloat16)
_SCHEMAS = {
    "bias_gelu": "(Tensor x, Tensor bias) -> Tensor",
    "bias_gelu_backward": "(Tensor gradient, Tensor x, Tensor bias) -> (Tensor, Tensor)",
    "drop_add_norm": "(Tensor x, Tensor bias, Tensor residual, Tensor weight, Tensor norm_bias, float ratio, "
    "float eps, bool invertible, bool with_sum) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "drop_add_norm_backward": "(Tensor gradient, Tensor? added, Tensor z_or_y, Tensor weight, Tensor norm_bias, "
    "Tensor mean, Tensor slope, Tensor kept, float ratio) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "softmax_drop": "(Tensor scores, Tensor? mask, float scale, float ratio) -> (Tensor, Tensor, Tensor)",
    "softmax_drop_backward": "(Tensor gradient, Tensor probabilities, Tensor kept, float scale, float ratio, "
    "bool with_dropped) -> (Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    _tags = (torch.Tag.nondeterministic_seeded,) if _name in ("drop_add_norm", "softmax_drop") else ()
    torch.library.define(f"dsjob::{_name}", _schema, tags=_tags)


def find_problem(*, build: bool) -> str:
    """Makes the functions below callable on GPUs. Returns why they are not, or nothing.

    build: also compile them. They have not run on a GPU yet, so nothing does so without being asked.
    """
    problem: str = load("transformer", build=build)
    return problem


def fits(dtype: torch.dtype, *widths: int) -> bool:
    """Whether the kernels take rows of these widths."""
    return dtype in _KINDS and all(0 < width <= _WIDEST and width % 4 == 0 for width in widths)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """`F.gelu(x + bias, approximate="tanh")`. x: [..., width]. Saves x."""
    out: Tensor = torch.ops.dsjob.bias_gelu(x.flatten(0, -2), bias)
    return out.view(x.shape)


def project_bias_gelu(x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(bias_gelu(x, bias), weight)`, which saves x, but computes the output of GELU again."""
    out: Tensor = _Project.apply(x, bias, weight)  # type: ignore[no-untyped-call]
    return out


def drop_add_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    *,
    ratio: float,
    eps: float,
    invertible: bool,
    with_sum: bool = False,
) -> tuple[Tensor, Tensor]:
    """y and z, where z = residual + dropout(x + bias), and y is z after LayerNorm. x: [..., width].

    invertible: save y instead of z for the backward pass, as `dsjob.ops.recomputed.norm_invertibly` does; then z is
    empty unless `with_sum`.
    """
    y, z, *_ = torch.ops.dsjob.drop_add_norm(
        x.flatten(0, -2), bias, residual.flatten(0, -2), weight, norm_bias, ratio, eps, invertible, with_sum
    )
    return y.view(x.shape), z.view(x.shape) if z.numel() == x.numel() else z


def fits_attention(scores: Tensor, mask: Tensor | None) -> bool:
    """Whether `mix_dropped` takes them."""
    return scores.dtype in _KINDS and 0 < scores.shape[-1] <= _WIDEST and (mask is None or not mask.requires_grad)


def mix_dropped(
    scores: Tensor, mask: Tensor | None, values: Tensor, *, scale: float, ratio: float, recomputed: bool
) -> Tensor:
    """`dropout(softmax(scores * scale + mask)) @ values`, with sums in fp32.

    scores: [batch, heads, queries, keys]. mask: broadcasts to them; it gets no gradient. values: [batch, heads, keys,
    features]. ratio: of the dropout, above 0 and below 1. recomputed: save the probabilities and a byte for each, but
    not what the dropout makes of them.
    """
    if mask is not None and mask.dim() < scores.dim():
        mask = mask[(None,) * (scores.dim() - mask.dim())]
    if recomputed:
        out: Tensor = _MixDropped.apply(scores, mask, values, scale, ratio)  # type: ignore[no-untyped-call]
        return out
    mixed: Tensor = torch.ops.dsjob.softmax_drop(scores, mask, scale, ratio)[0] @ values
    return mixed


class _MixDropped(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, values: Tensor, scale: float, ratio: float) -> Tensor:
        dropped, probabilities, kept = torch.ops.dsjob.softmax_drop(scores, mask, scale, ratio)
        ctx.save_for_backward(probabilities, kept, values)
        ctx.scale, ctx.ratio = scale, ratio
        mixed: Tensor = dropped @ values
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, kept, values = ctx.saved_tensors
        to_scores, dropped = torch.ops.dsjob.softmax_drop_backward(
            gradient @ values.transpose(-1, -2), probabilities, kept, ctx.scale, ctx.ratio, True
        )
        return to_scores, None, dropped.transpose(-1, -2) @ gradient, None, None


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias, weight)
        return bias_gelu(x, bias) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, bias, weight = ctx.saved_tensors
        rows, slope = x.flatten(0, -2), gradient.flatten(0, -2)
        to_x, to_bias = torch.ops.dsjob.bias_gelu_backward(slope @ weight, rows, bias)
        return to_x.view(x.shape), to_bias, slope.t() @ torch.ops.dsjob.bias_gelu(rows, bias)


def _save_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_gelu(ctx: Any, gradient: Tensor) -> Any:
    return torch.ops.dsjob.bias_gelu_backward(gradient, *ctx.saved_tensors)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, weight, norm_bias, ctx.ratio, _, invertible, _ = inputs
    y, z, kept, mean, slope = output
    ctx.mark_non_differentiable(kept, mean, slope)
    ctx.set_materialize_grads(False)  # the sum has a gradient only if something uses it
    ctx.save_for_backward(y if invertible else z, weight, norm_bias, mean, slope, kept)


def _backward_norm(ctx: Any, to_y: Tensor | None, to_z: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    source, *saved = ctx.saved_tensors
    if to_y is None:
        to_y = torch.zeros_like(source)
    to_residual, to_x, to_weight, to_norm_bias, to_bias = torch.ops.dsjob.drop_add_norm_backward(
        to_y, to_z, source, *saved, ctx.ratio
    )
    # Without dropout both are equal, and the op computes one.
    return (to_x if ctx.ratio else to_residual), to_bias, to_residual, to_weight, to_norm_bias, None, None, None, None


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, ctx.scale, ctx.ratio = inputs
    _, *rest = output
    ctx.mark_non_differentiable(*rest)
    ctx.save_for_backward(*rest)


def _backward_softmax(ctx: Any, to_dropped: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.dsjob.softmax_drop_backward(to_dropped, *ctx.saved_tensors, ctx.scale, ctx.ratio, False)
    return found[0], None, None, None


def _fake_softmax(scores: Tensor, mask: Tensor | None, scale: float, ratio: float) -> tuple[Tensor, ...]:
    like = scores.new_empty(scores.shape)
    return like, torch.empty_like(like), torch.empty_like(like, dtype=torch.uint8)


def _fake_softmax_backward(
    gradient: Tensor, probabilities: Tensor, kept: Tensor, scale: float, ratio: float, with_dropped: bool
) -> tuple[Tensor, ...]:
    shape = probabilities.shape
    return probabilities.new_empty(shape), probabilities.new_empty(shape if with_dropped else 0)


def _fake_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, ratio: float, eps: float,
    invertible: bool, with_sum: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = x.shape[0]
    z = x.new_empty(x.shape if with_sum or not invertible else 0)
    kept = x.new_empty(x.shape if ratio > 0 else 0, dtype=torch.uint8)
    mean, slope = (x.new_empty(size, dtype=torch.float32) for size in (0 if invertible else rows, rows))
    return x.new_empty(x.shape), z, kept, mean, slope


def _fake_norm_backward(
    gradient: Tensor, added: Tensor | None, z_or_y: Tensor, weight: Tensor, norm_bias: Tensor, mean: Tensor,
    slope: Tensor, kept: Tensor, ratio: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    to_x = z_or_y.new_empty(z_or_y.shape if ratio > 0 else 0)
    return z_or_y.new_empty(z_or_y.shape), to_x, *(weight.new_empty(weight.shape) for _ in range(3))


torch.library.register_fake("dsjob::bias_gelu", lambda x, bias: x.new_empty(x.shape))
torch.library.register_fake(
    "dsjob::bias_gelu_backward", lambda gradient, x, bias: (x.new_empty(x.shape), bias.new_empty(bias.shape))
)
torch.library.register_fake("dsjob::drop_add_norm", _fake_norm)
torch.library.register_fake("dsjob::drop_add_norm_backward", _fake_norm_backward)
torch.library.register_autograd("dsjob::bias_gelu", _backward_gelu, setup_context=_save_gelu)
torch.library.register_autograd("dsjob::drop_add_norm", _backward_norm, setup_context=_save_norm)
torch.library.register_fake("dsjob::softmax_drop", _fake_softmax)
torch.library.register_fake("dsjob::softmax_drop_backward", _fake_softmax_backward)
torch.library.register_autograd("dsjob::softmax_drop", _backward_softmax, setup_context=_save_softmax)
