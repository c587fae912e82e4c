"""Sums of gradients that are kept in a lower precision between micro steps (`data_types.grad_accum_dtype`).

After each micro step, the gradients of the masters, already reduced, are added to the sums, and freed. So until the
boundary, a rank holds them in the lower precision alone, also while the next forward pass keeps its activations.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dsjob.optim.shards import local


class HeldSums:
    """By name of a master: the sum of this rank's parts of its gradients, in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def hold(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Takes the masters' gradients."""
        for name, master in masters.items():
            if master.grad is None:
                continue
            own, held = local(master.grad), self._sums.get(name)
            self._sums[name] = own.to(self._dtype, copy=True) if held is None else held.add_(own)
            master.grad = None

    @torch.no_grad()
    def give(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Adds the sums to the masters' gradients, and rounds these alike."""
        for name, held in self._sums.items():
            master = masters[name]
            if master.grad is None:
                master.grad = torch.zeros_like(master.data)
            own = local(master.grad)
            own.copy_(held.add_(own))
        self._sums.clear()

    def drop(self) -> None:
        """Drops the sums of a step that will not be finished."""
        self._sums.clear()
