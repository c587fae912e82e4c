"""A small decoder-only GPT: the model behind the quickstart and the `gpt` recipes.

Only the network and its initialisation. `recipes/text.py` has the data. Training, sharding and saving are up to the
job, so nothing here knows about devices or ranks.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GPT2_STD, GPT2_WIDTH = 0.02, 768


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then an MLP four times as wide. [B, T, W] -> [B, T, W]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Float [B, T, W] in, the same shape and dtype out; position t sees positions up to t only."""
        x = x + self._drop(self._attend(self.attention_norm(x)))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # [B, heads, T, W / heads]
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Token and learned position embeddings, `layers` blocks, a final norm, and a head tied to the token embedding.

    The head has no parameter of its own: it multiplies by the embedding matrix. So the tie survives sharding and a move
    from the meta device, and a checkpoint contains the matrix once.
    """

    # How ranks divide the layers among them (tensor_parallel): each has some heads, and a part of the wide layer.
    tp_plan: ClassVar[dict[str, Any]] = {
        "blocks.*.qkv": {"style": "colwise", "sections": 3},
        "blocks.*.attention_out": "rowwise",
        "blocks.*": {"divide": ["heads"]},
        "blocks.*.mlp_in": "colwise",
        "blocks.*.mlp_out": "rowwise",
    }

    def __init__(self, vocab_size: int, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.dropout = dropout
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialises every parameter, in place.

        Matrices are normal with GPT-2's deviation, 0.02 at width 768, times sqrt(768 / width): narrower layers need
        larger weights for the same signal (at width 128, a short run with 0.02 ends 0.2 nats higher). The two matrices
        of a block that write into the residual stream are divided by sqrt(2 * layers), so that its variance does not
        grow with depth. Biases are 0, norms 1.
        """
        std = GPT2_STD * math.sqrt(GPT2_WIDTH / self.tokens.embedding_dim)
        residual_std = std / math.sqrt(2 * len(self.blocks))
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=residual_std if name.endswith("_out") else std)
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Predicts the token after each token.

        Args:
            inputs: int64 [B, T], T at most `context`.
            targets: int64 [B, T], `inputs` shifted left by one, or None.

        Returns:
            `logits`, [B, T, V]; and with targets `loss`, a scalar: the mean cross entropy in fp32, in nats per token.

        Raises:
            ValueError: T is larger than `context`.
        """
        length = inputs.size(1)
        if length > self.context:
            raise ValueError(f"inputs are {length} tokens long; this model has positions for {self.context}")
        x = self.tokens(inputs) + self.positions(torch.arange(length, device=inputs.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())}


def build(
    vocab_size: int = 256, context: int = 128, layers: int = 4, width: int = 128, heads: int = 4, dropout: float = 0.0
) -> GPT:
    """A GPT with about 12 * layers * width^2 parameters, in fp32. The default is byte-level, with 0.84 million.

    Raises:
        ValueError: a size below 1, a `width` that is not a multiple of `heads`, or a `dropout` outside [0, 1).
    """
    sizes = {"vocab_size": vocab_size, "context": context, "layers": layers, "width": width, "heads": heads}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if width % heads:
        raise ValueError(f"width {width} cannot be split over {heads} heads; it must be a multiple of heads")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1")
    return GPT(vocab_size, context, layers, width, heads, dropout)
