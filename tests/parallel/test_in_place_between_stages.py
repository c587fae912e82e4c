"""Models that change the outputs of their blocks in place, outside of blocks: a pipeline computes what they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsjob.compute.aliases import alias
from dsjob.parallel.pipeline.calls import cut_model, trace
from dsjob.parallel.pipeline.layers import Received
from dsjob.parallel.pipeline.walk import take_part


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """The output of the second block goes to the head too, past the stages between them."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.change, self.scale = change, nn.Parameter(torch.full((4,), 1.5))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            self.change(x, self.scale[number])
            kept = x if number == 1 else kept
        out: Tensor = self.head(x + kept)
        return out


def multiply(x: Tensor, factor: Tensor) -> None:
    x *= factor


def shift_a_part(x: Tensor, by: Tensor) -> None:
    x[:, :2] += by


def leave(x: Tensor, _: Tensor) -> None:
    pass


def run_stages(stages: list[nn.Module], x: Tensor) -> Tensor:
    """A forward and a backward pass through stages one after another. Returns the output."""
    received: list[tuple[Tensor, ...]] = []
    value: Any = stages[0](x, pipe_chunk=0)
    sent = [value]
    for stage in stages[1:]:
        received.append(tuple(each.detach().requires_grad_() for each in value))
        value = stage(x, pipe_chunk=0, pipe_received=Received(alias(received[-1], lambda _: True)))
        sent.append(value)
    sent[-1].sum().backward()
    for outputs, taken in zip(sent[-2::-1], received[::-1], strict=True):
        torch.autograd.backward(outputs, [each.grad for each in taken])
    return sent[-1].detach()


@pytest.mark.parametrize("change", [multiply, shift_a_part, leave])
def test_changes_in_place_between_blocks_are_made_once(change: Callable[[Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)
    net, x = Net(change), torch.randn(3, 4)
    cut = cut_model(net, trace(net, (x,), {}), 4, "uniform")
    stages = [take_part(copy.deepcopy(net), cut, rank=rank, ranks=4).module for rank in range(4)]
    for _ in range(2):  # what stands for other stages' outputs must not change either
        net.zero_grad()
        for stage in stages:
            stage.zero_grad()
        want = net(x)
        want.sum().backward()
        assert torch.allclose(run_stages(stages, x), want)
        for name, parameter in net.named_parameters():
            here = [dict(stage.named_parameters()).get(name) for stage in stages]
            found = sum((p.grad for p in here if p is not None and p.grad is not None), torch.zeros_like(parameter))
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.allclose(found, expected, atol=1e-5), name


class Scaled(Net):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return super().forward(x)


def test_a_batch_that_a_model_was_traced_with_is_as_before() -> None:
    x = torch.ones(3, 4)
    trace(Scaled(leave), (x,), {})
    assert torch.equal(x, torch.ones(3, 4))
