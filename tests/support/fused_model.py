"""A model with fused layers, and how they are divided in DeepSpeed's form."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, SHARED = 32, 4, 2  # SHARED: heads of keys and values
SIZES = [WIDTH, WIDTH * SHARED // HEADS, WIDTH * SHARED // HEADS]
SPECS = [
    {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [SIZES, -1], "partition_dim": 0},
    {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column", "shape": [2, -1]},
    {"patterns": ["head.weight$"], "partition_type": "column", "gather_output": True},
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, SHARED
        self.qkv, self.out = nn.Linear(WIDTH, sum(SIZES)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = WIDTH // HEADS
        heads = self.qkv(x).unflatten(-1, (-1, size)).transpose(-2, -3)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], -3)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        done: Tensor = self.out(y.transpose(-2, -3).flatten(-2))
        return done


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.after = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        gate, up = self.up(self.after(x)).chunk(2, -1)
        done: Tensor = x + self.down(F.silu(gate) * up)
        return done


class FusedModel(nn.Module):
    """Fused queries, keys and values of unequal sizes, a fused gate, and an output layer that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        done: Tensor = self.head(x)
        return done
