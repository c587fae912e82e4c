"""How long stages really wait for one another, against the formulas in the guide to pipelines.

Layers sleep in place of computing, so that stages do not compete for cores.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from pipelines import make_engine
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob.compute.later_weights import Later
from dsjob.deepspeed.pipe import LayerSpec
from dsjob.pipelines.orders import SCHEDULES
from dsjob.ranks.mesh import World

TICK, MICRO, STEPS = 0.2, 8, 3  # seconds of a stage's forward pass, micro batches, steps
slept: list[float] = []  # seconds of this rank


def sleep(seconds: float) -> None:
    started = time.perf_counter()
    time.sleep(seconds)
    slept.append(time.perf_counter() - started)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sleep(ctx.seconds)
        return gradient, None, None


class Sleeper(nn.Module):
    """A linear layer that takes so many seconds forward, and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(4)), (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = _Sleep.apply(F.linear(x, self.weight), *self.seconds)  # type: ignore[no-untyped-call]
        return done


def sleep_first(run: Any, seconds: float, later: Later) -> None:
    sleep(seconds)
    run(later)


def measure(world: World, name: str, chunks: int) -> float:
    """The share of a step in which a stage does not sleep; the least of some steps."""
    stages, tick = world.everyone.size, TICK / chunks
    splits = name == "zero-bubble"
    if splits:  # half of a backward pass computes the gradients of weights
        own = Later.run
        Later.run = lambda later: sleep_first(own, tick, later)  # type: ignore[method-assign]
    layers = [LayerSpec(Sleeper, tick, tick if splits else 2 * tick) for _ in range(stages * chunks)]
    schedule = partial(SCHEDULES[name], chunks=chunks)
    given = {"partition_method": "uniform", "chunks": chunks, "schedule": schedule, "loss_fn": nn.MSELoss()}
    engine = make_engine(world, stages, layers=layers, micro=MICRO, **given)
    batch, waited = [(torch.ones(4, 4), torch.zeros(4, 4))] * MICRO, []
    for _ in range(STEPS):
        slept.clear()
        started = time.perf_counter()
        engine.train_batch(iter(batch))
        waited.append(1 - sum(slept) / (time.perf_counter() - started))
    return min(waited[1:])


@pytest.mark.full
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("name", "chunks", "rounds"), [("1f1b", 1, 1), ("gpipe", 1, 1), ("interleaved", 2, 2), ("zero-bubble", 1, 3)]
)
def test_stages_wait_for_as_long_as_the_formula_says(stages: int, name: str, chunks: int, rounds: int) -> None:
    expected = (stages - 1) / (rounds * MICRO + stages - 1)
    found = run_ranks(measure, stages, name, chunks)
    measured = sum(found) / stages
    assert measured == pytest.approx(expected, abs=0.03), f"measured {measured:.1%}, expected {expected:.1%}"
