"""The network and batches of tests/data/deepspeed_runs: small, so that many checkpoints of it weigh little."""

from __future__ import annotations

import torch
from net import Block
from torch import Tensor, nn

VOCAB, WIDTH, ROWS = 23, 7, 12


class SmallNet(nn.Module):
    """`variant`: `tied` (head and embedding are one), `frozen` (the first block is not trained), or any other."""

    def __init__(self, variant: str = "plain") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.emb = nn.Embedding(VOCAB, WIDTH)
            self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(2)])
            self.ln_f = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        if variant == "tied":
            self.head.weight = self.emb.weight
        if variant == "frozen":
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.ln_f(h)).float()
        return nn.functional.cross_entropy(logits.view(-1, VOCAB), y.view(-1))


def make_rows(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one global batch: int64 [ROWS, 5], the same for every caller."""
    tokens = torch.randint(0, VOCAB, (ROWS, 6), generator=torch.Generator().manual_seed(500 + step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
