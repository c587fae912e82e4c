"""A model for jobs of `small_jobs` whose gradients are not finite in one step."""

from __future__ import annotations

import os

import torch
from small_jobs import Net
from torch import Tensor


class Unstable(Net):
    """The gradient of `out.bias` is nan in the third training step, on the last rank alone."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        self.calls += self.training
        last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        if self.calls != 3 or not last:
            return loss
        # sqrt has an infinite slope at 0, and inf * 0 is nan: the loss itself stays finite.
        return loss + 0 * torch.sqrt(self.out.bias.sum() * 0)
