"""A whole optimizer step in one call gives the bits that forward, backward and step give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engines import make_engine, make_tokens, whole_state
from ranks import run_ranks
from torch import Tensor

from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.parallel.strategy import MicroBatch
from dsjob.ranks.mesh import World

ACCUMULATION = 3
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def cut(world: World, step: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro batches of a step: inputs and targets, int64 [2, 11]."""
    rows = 2 * ACCUMULATION * world.data_size
    parts = [part.chunk(ACCUMULATION * world.data_size) for part in make_tokens(step, rows)]
    mine = range(world.data_rank, ACCUMULATION * world.data_size, world.data_size)
    return [(parts[0][number], parts[1][number]) for number in mine]


def read(engine: Engine, loss: float) -> dict[str, Any]:
    return {"loss": loss, "norm": engine.get_global_grad_norm(), "counts": engine.rhythm.counts()}


def train_by_calls(engine: Engine, world: World) -> list[dict[str, Any]]:
    found = []
    for step in range(3):
        parts = []
        for inputs, targets in cut(world, step):
            parts.append(engine.backward(engine(inputs, targets)).detach().float())
            engine.step()
        found.append(read(engine, float(torch.stack(parts).sum())))
    return found


def train_by_steps(engine: Engine, world: World) -> list[dict[str, Any]]:
    return [read(engine, float(engine.run_step(cut(world, step), lambda outputs, _: outputs))) for step in range(3)]


def compare(world: World, kind: str) -> list[tuple[str, bool, bool]]:
    """By stage: whether what was read, and all that a checkpoint keeps, are the same bits."""
    same = []
    for stage in range(4):
        engines = [
            make_engine(stage, accumulation=ACCUMULATION, gradient_clipping=0.5, **KINDS[kind]) for _ in range(2)
        ]
        told = [train(engine, world) for train, engine in zip((train_by_calls, train_by_steps), engines, strict=True)]
        states = [whole_state(engine) for engine in engines]
        equal = states[0].keys() == states[1].keys() and all(
            torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()
        )
        same.append((f"stage {stage}", told[0] == told[1], equal))
    return same


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.full("2-bf16", "2-fp16", "2-autocast")
def test_a_step_in_one_call_gives_the_same_bits(ranks: int, kind: str) -> None:
    for same in run_ranks(compare, ranks, kind):
        assert same == [(f"stage {stage}", True, True) for stage in range(4)]


def order_by_itself(world: World) -> dict[str, Any]:
    """A strategy that runs all forward passes first, as the first stage of a pipeline does."""
    engine = make_engine(2, accumulation=ACCUMULATION)
    strategy, order = engine.strategy, []

    def run_step(micro_batches: Sequence[MicroBatch], loss: Callable[[Any, Any], Tensor]) -> list[Tensor]:
        values = []
        for args, kwargs, target in micro_batches:
            strategy.start_micro_step(boundary=False, sync=False)
            values.append(loss(strategy.forward(*args, **kwargs), target))
            order.append("forward")
        for value in values:
            value.backward()
            order.append("backward")
        return [value.detach() for value in values]

    strategy.run_step = run_step  # type: ignore[method-assign]
    usual = make_engine(2, accumulation=ACCUMULATION)
    losses = [told["loss"] for told in train_by_steps(engine, world)]
    expected = [told["loss"] for told in train_by_calls(usual, world)]
    return {"order": order, "losses": losses, "expected": expected, "steps": engine.global_steps}


def test_a_strategy_may_order_the_passes_by_itself() -> None:
    for found in run_ranks(order_by_itself, 2):
        assert found["order"] == ["forward"] * 3 + ["backward"] * 3 + (["forward"] * 3 + ["backward"] * 3) * 2
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["steps"] == 3


def test_a_step_takes_all_its_micro_batches() -> None:
    engine = make_engine(0, accumulation=2)
    inputs, targets = make_tokens(0, 2)
    batch = {"tokens": inputs, "targets": targets}

    def loss(outputs: Any, given: Any) -> Tensor:
        assert given is batch
        return outputs

    with pytest.raises(UsageError, match="got 1 micro batches, but a step has 2"):
        engine.run_step([batch], loss)
    engine.backward(engine(inputs, targets))
    engine.step()
    with pytest.raises(UsageError, match="already in progress"):
        engine.run_step([batch, batch], loss)
    engine.backward(engine(inputs, targets))
    engine.step()
    with engine.no_sync(), pytest.raises(UsageError, match="already in progress"):
        engine.run_step([batch, batch], loss)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_backward_pass_of_the_programs_own_begins_a_step(accumulation: int, stage: int) -> None:
    engine = make_engine(stage, accumulation=accumulation)
    batches = [make_tokens(0, 2)] * accumulation
    for _ in range(2):
        engine(*batches[0]).backward()
        with pytest.raises(UsageError, match="already in progress"):
            engine.run_step(batches, lambda outputs, _: outputs)
        engine.zero_grad()
        engine.run_step(batches, lambda outputs, _: outputs)


def test_a_step_does_not_add_to_gradients_that_are_there() -> None:
    engine = make_engine(0, accumulation=2, gradient_clipping=0.0)
    inputs, targets = make_tokens(0, 2)
    batches, losses = [(inputs, targets)] * 2, iter([1.0, None, 1.0, 1.0])

    def fail_once(outputs: Any, _: Any) -> Tensor:
        factor = next(losses)
        if factor is None:
            raise ValueError("the loss failed")
        return outputs * factor

    with pytest.raises(ValueError, match="the loss failed"):
        engine.run_step(batches, fail_once)
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    engine.backward(engine(inputs, targets))
    with pytest.raises(UsageError, match="already in progress"):
        engine.run_step(batches, lambda outputs, _: outputs)
    engine.zero_grad()
    engine.run_step(batches, fail_once)
    clean = make_engine(0, accumulation=2, gradient_clipping=0.0)
    clean.run_step(batches, lambda outputs, _: outputs)
    assert engine.get_global_grad_norm() == clean.get_global_grad_norm()
