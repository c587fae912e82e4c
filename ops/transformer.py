"""DeepSpeed's transformer layer: the encoder layer of BERT, with LayerNorm after or before each part.

It consists of PyTorch's operators, so it runs on CPUs and GPUs; on GPUs, the op `transformer` fuses some of them where
it has been built (`dsjob.ops.fused`). The names of parameters and options are DeepSpeed's,
and so is the arithmetic: GELU is the approximation with tanh, and in a layer with `pre_layer_norm`, `norm_w` belongs to
the attention and `attn_nw` to the feed-forward part. So checkpoints of DeepSpeed's layer load.

Dropout draws from torch's generators, which a job's `seed` seeds, a checkpoint restores, and recomputed activations
replay. All options draw the same numbers in the same order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob.errors import UsageError
from dsjob.ops import fused
from dsjob.ops.recomputed import drop, multiply_dropped, norm_invertibly, project_gelu
from dsjob.ops.transformer_config import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig


class DeepSpeedTransformerLayer(nn.Module):
    """A layer of a BERT encoder: self-attention, then a feed-forward part; each with dropout, residual and LayerNorm.

    initial_weights, initial_biases: instead of new parameters, copies of tensors for query, key, value, attention
    output, attention norm, intermediate, output and norm, in this order.

    Raises UsageError for a config that is incomplete or contradictory.
    """

    layer_id: ClassVar[int] = 0  # of the next layer

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        config.check()
        self.config = config
        config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        if config.local_rank >= 0 and torch.cuda.is_available():
            torch.cuda.set_device(config.local_rank)
        width, inner = config.hidden_size, config.intermediate_size
        # DeepSpeed's order: its checkpoints number the optimizer's state by it.
        self.attn_qkvw = nn.Parameter(torch.empty(3 * width, width))
        self.attn_qkvb = nn.Parameter(torch.empty(3 * width))
        self.attn_ow = nn.Parameter(torch.empty(width, width))
        self.attn_ob = nn.Parameter(torch.empty(width))
        self.attn_nw = nn.Parameter(torch.empty(width))
        self.attn_nb = nn.Parameter(torch.empty(width))
        self.inter_w = nn.Parameter(torch.empty(inner, width))
        self.inter_b = nn.Parameter(torch.empty(inner))
        self.output_w = nn.Parameter(torch.empty(width, inner))
        self.output_b = nn.Parameter(torch.empty(width))
        self.norm_w = nn.Parameter(torch.empty(width))
        self.norm_b = nn.Parameter(torch.empty(width))
        if initial_weights is None or initial_biases is None:
            self.init_transformer_weights(config.adjust_init_range)
        for kind, given in (("w", initial_weights), ("b", initial_biases)):
            if given is not None:
                self._take(kind, given)
        # Whether the fused kernels compute on GPUs; see `dsjob.engine.native`. Decided here, since looking for the
        # library would break the graph of a compiled forward pass.
        self.native = torch.cuda.is_available() and not fused.find_problem(build=False)
        self.train(config.training)

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Initialises every parameter, in place: normal weights, biases of 0, and norms of 1.

        Raises UsageError without the options that it needs: initializer_range and, to adjust it, num_hidden_layers.
        """
        config = self.config
        std = config.initializer_range
        if std < 0:
            raise UsageError(f"initializer_range is {std}; give the standard deviation of new weights, such as 0.02")
        if adjust_init_range and config.num_hidden_layers < 1:
            raise UsageError(
                f"num_hidden_layers is {config.num_hidden_layers}; adjust_init_range needs the number of layers"
            )
        residual_std = std / math.sqrt(2 * config.num_hidden_layers) if adjust_init_range else std
        for name, parameter in self.named_parameters():
            if name.endswith("b"):
                nn.init.zeros_(parameter)
            elif name in ("attn_nw", "norm_w"):
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=residual_std if name in ("attn_ow", "output_w") else std)

    def _take(self, kind: str, given: Sequence[Tensor]) -> None:
        """Copies initial weights (kind w) or biases (b)."""
        if len(given) != 8:
            raise UsageError(
                f"{len(given)} initial tensors; expected 8: q, k, v, attention output and norm, "
                "intermediate, output, norm"
            )
        names = ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")
        for name, tensor in zip(names, (torch.cat([part.detach() for part in given[:3]]), *given[3:]), strict=True):
            own = getattr(self, name + kind)
            if own.shape != tensor.shape:
                raise UsageError(
                    f"the initial tensor for {name + kind} is {list(tensor.shape)}; this config needs {list(own.shape)}"
                )
            setattr(self, name + kind, nn.Parameter(tensor.detach().clone()))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        layer_head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: list[Any] | None = None,
        **others: Any,
    ) -> Tensor | tuple[Tensor]:
        """The layer's output, with the shape and dtype of `hidden_states`.

        hidden_states: float [B, S, hidden_size]. attention_mask: bool, True where a position may be attended to, or
        float, added to the scores (BERT: 0 and -10000): [B, S], or broadcastable to [B, heads, S, S] such as
        [B, 1, 1, S]. grads: a list to which the backward pass appends [gradient, name], as DeepSpeed's tests expect.
        The other arguments are those of transformers' layers, whose place this one can take; they may only be None or
        False.

        Raises UsageError for one of these, and for a mask of another dtype.
        """
        unsupported = {
            "head_mask": head_mask,
            "layer_head_mask": layer_head_mask,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "past_key_value": past_key_value,
            "output_attentions": output_attentions,
            **others,
        }
        for name, value in unsupported.items():
            if value is not None and value is not False:
                raise UsageError(f"DeepSpeedTransformerLayer does not support {name}")
        if grads is not None:
            self._record(grads)
        device = hidden_states.device.type
        dtype = self._choose_dtype(device)
        with torch.autocast(device, enabled=False):
            out = self._compute(hidden_states.to(dtype), _make_additive(attention_mask, dtype))
        out = out.to(hidden_states.dtype)
        return (out,) if self.config.return_tuple or self.config.huggingface else out

    def _choose_dtype(self, device: str) -> torch.dtype:
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        own = self.attn_qkvw.dtype
        return torch.float16 if self.config.fp16 and own == torch.float32 else own

    def _compute(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self._can_fuse(x):
            return self._compute_fused(x, mask)
        if self.config.pre_layer_norm:
            x = x + self._attend(self._norm(x, self.norm_w, self.norm_b), mask)
            return x + self._feed(self._norm(x, self.attn_nw, self.attn_nb))
        x = self._norm(x + self._attend(x, mask), self.attn_nw, self.attn_nb)
        return self._norm(x + self._feed(x), self.norm_w, self.norm_b)

    def _can_fuse(self, x: Tensor) -> bool:
        return self.native and x.is_cuda and fused.fits(x.dtype, self.config.hidden_size, self.config.intermediate_size)

    def _compute_fused(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The same as `_compute` with the kernels of `dsjob.ops.fused`."""
        config, kind = self.config, x.dtype
        first = self._norm(x, self.norm_w, self.norm_b) if config.pre_layer_norm else x
        attended = F.linear(self._mix(first, mask), self.attn_ow.to(kind))
        normed, total = self._add_and_norm(attended, self.attn_ob, x, self.attn_nw, self.attn_nb)
        inner = F.linear(normed, self.inter_w.to(kind))
        bias, weight = self.inter_b.to(kind), self.output_w.to(kind)
        if config.gelu_checkpoint:
            fed = fused.project_bias_gelu(inner, bias, weight)
        else:
            fed = F.linear(fused.bias_gelu(inner, bias), weight)
        if config.pre_layer_norm:
            return total + self._drop(fed + self.output_b.to(kind))
        return self._add_and_norm(fed, self.output_b, normed, self.norm_w, self.norm_b)[0]

    def _add_and_norm(
        self, x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        y, z = fused.drop_add_norm(
            x,
            *(bias.to(x.dtype), residual, weight.to(x.dtype), norm_bias.to(x.dtype)),
            ratio=max(config.hidden_dropout_ratio, 0.0) if self.training else 0.0,
            eps=config.layer_norm_eps,
            invertible=config.normalize_invertible,
            with_sum=config.pre_layer_norm,
        )
        return y, z

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """What the attention adds to the residual stream, [B, S, hidden_size]."""
        return self._drop(F.linear(self._mix(x, mask), self.attn_ow.to(x.dtype), self.attn_ob.to(x.dtype)))

    def _mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The attention without its last projection, [B, S, hidden_size]."""
        config, kind = self.config, x.dtype
        projected = F.linear(x, self.attn_qkvw.to(kind), self.attn_qkvb.to(kind))
        parts = projected.view(*x.shape[:2], 3, config.heads, -1).permute(2, 0, 3, 1, 4)  # [3, B, heads, S, D]
        ratio = max(config.attn_dropout_ratio, 0.0) if self.training else 0.0
        if not ratio or _has_attention_kernel(parts):
            q, k, v = parts
            mixed = F.scaled_dot_product_attention(q, k, v, mask, ratio)
        else:
            mixed = self._mix_dropped(parts, mask, ratio)
        return mixed.transpose(1, 2).flatten(2)

    def _mix_dropped(self, parts: Tensor, mask: Tensor | None, ratio: float) -> Tensor:
        """Attention with dropout where SDPA would store every intermediate result. parts: [3, B, heads, S, D]."""
        q, k, v = parts.contiguous()  # one copy, which both products save; they would make copies of their own
        recomputed, scale = self.config.attn_dropout_checkpoint, q.shape[-1] ** -0.5
        scores = q @ k.transpose(-1, -2)
        mixed: Tensor
        if self._can_fuse(parts) and fused.fits_attention(scores, mask):
            mixed = fused.mix_dropped(scores, mask, v, scale=scale, ratio=ratio, recomputed=recomputed)
        else:
            scores = scores * scale
            probabilities = (scores if mask is None else scores + mask).softmax(-1)
            mixed = multiply_dropped(probabilities, v, ratio) if recomputed else drop(probabilities, ratio) @ v
        return mixed

    def _feed(self, x: Tensor) -> Tensor:
        """What the feed-forward part adds to the residual stream, [B, S, hidden_size]."""
        kind = x.dtype
        inner = F.linear(x, self.inter_w.to(kind), self.inter_b.to(kind))
        weight, bias = self.output_w.to(kind), self.output_b.to(kind)
        if self.config.gelu_checkpoint:
            return self._drop(project_gelu(inner, weight, bias))
        return self._drop(F.linear(F.gelu(inner, approximate="tanh"), weight, bias))

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
        if self.config.normalize_invertible:
            normed: Tensor = norm_invertibly(x, weight, bias, self.config.layer_norm_eps)
            return normed
        return F.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_eps)

    def _drop(self, x: Tensor) -> Tensor:
        ratio = self.config.hidden_dropout_ratio
        return drop(x, ratio) if self.training and ratio > 0 else x

    def _record(self, grads: list[Any]) -> None:
        """Appends gradients to `grads` as they are computed, under the names in DeepSpeed's tests."""
        start = 2 * self.config.hidden_size
        names = {"attn_qkv": "V", "attn_o": "O", "attn_n": "N2", "inter_": "int", "output_": "out", "norm_": "norm"}
        for (first, name), kind in itertools.product(names.items(), "wb"):

            def append(found: Tensor, label: str = f"{name}_{kind.upper()}") -> None:
                grads.append([found[start:] if label[0] == "V" else found, label])

            getattr(self, first + kind).register_hook(append)


def _has_attention_kernel(parts: Tensor) -> bool:
    """Whether SDPA has a kernel with dropout for queries, keys and values [..., D], which stores no probabilities.

    There are such kernels for GPUs. They load 16 bytes at once.
    """
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return parts.is_cuda and parts.dtype in kinds and parts.shape[-1] * parts.itemsize % 16 == 0


def _make_additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as numbers to add to the scores. They are finite, so a row without any position gives no NaN."""
    if mask is None:
        return None
    lowest = torch.finfo(dtype).min / 2  # half of it, so that a score can be added
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    elif mask.is_floating_point():
        mask = mask.to(dtype).clamp(min=lowest)
    else:
        raise UsageError(
            f"attention_mask is {mask.dtype}; expected torch.bool (True: may be attended to), "
            "or a float that is added to the scores",
            hint="mask.bool() if it has ones and zeros",
        )
    return mask[:, None, None, :] if mask.dim() == 2 else mask
