"""A stage recomputes groups of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsjob.checkpointing import checkpoint
from dsjob.parallel.pipeline.layers import LayerSequence


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_recomputing_leaves_gradients_as_they_are_with_layers_that_work_in_place(interval: int) -> None:
    torch.manual_seed(0)
    layers: list[Callable[[Tensor], Tensor]] = [nn.Linear(3, 4), nn.ELU(inplace=True), torch.neg, nn.Linear(4, 2)]
    again: list[int] = []

    def count(function: Callable[..., Any], *inputs: Any) -> Any:
        again.append(1)
        return checkpoint(function, *inputs)

    found = []
    for each in (0, interval):
        run, batch = LayerSequence([list(enumerate(layers))], interval=each, again=count), torch.ones(2, 3)
        run(batch.requires_grad_()).square().mean().backward()
        found.append([batch.grad, *[p.grad for layer in (layers[0], layers[3]) for p in layer.parameters()]])  # type: ignore[attr-defined]
        for layer in (layers[0], layers[3]):
            layer.zero_grad()  # type: ignore[attr-defined]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert len(again) == 2  # the groups with a Linear
