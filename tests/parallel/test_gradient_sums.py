"""The dtype that gradients are added up in, and what they are divided by before they are reduced."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from engines import make_engine, train_engine
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.ranks.mesh import World

# bf16 has 8 bits: a quarter beside 64 is lost in it, one at a time.
MICRO = (256.0, 1.0, 1.0, 1.0)
# Norms: the mean over micro batches in each of four elements. Ranks add up squares of rounded norms of their own.
WHOLE, ROUNDED = pytest.approx(2 * 64.75, rel=1e-6), pytest.approx(2 * 64.0, rel=1e-6)


class Dot(nn.Module):
    """A gradient that is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def sum_up(world: World, asked: str | None, offload: bool, **config: Any) -> list[float]:
    """The norm of the gradient of the second step, at each stage."""
    norms = []
    for stage in range(1 if offload else 0, 4):
        zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
        types = {"data_types": {"grad_accum_dtype": asked}} if asked else {}
        engine = make_engine(
            stage, net=Dot(), accumulation=4, bf16=True, zero_optimization=zero, gradient_clipping=0, **types, **config
        )
        for _ in range(2):
            for value in MICRO:
                engine.backward(engine(torch.full((4,), value)))
                engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def sum_up_everywhere(world: World) -> dict[tuple[str | None, bool], list[float]]:
    return {key: sum_up(world, *key) for key in itertools.product((None, "fp32"), (False, True))}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_add_up_in_the_dtype_that_is_asked_for(world_size: int) -> None:
    for found in run_ranks(sum_up_everywhere, world_size):
        assert found["fp32", False] == [WHOLE] * 4
        assert found["fp32", True] == [WHOLE] * 3
        assert found[None, False] == [ROUNDED, ROUNDED, WHOLE, WHOLE]
        assert found[None, True] == [ROUNDED, WHOLE, WHOLE]


def reduce_in_fp32(world: World) -> list[float]:
    return sum_up(world, "fp32", False, communication_data_type="fp32")


@pytest.mark.slow
def test_sums_in_fp32_may_travel_in_fp32() -> None:
    for norms in run_ranks(reduce_in_fp32, 2):
        assert norms == [WHOLE] * 4


def predivide(world: World) -> dict[str, tuple[list[float], bool]]:
    """Losses of steps in fp32, and whether a gradient of 40000 overflows fp16 on its way."""
    found = {}
    for name, config in {
        "neither": {},
        "prescaled": {"prescale_gradients": True, "gradient_predivide_factor": 0.25},
        "in two parts": {"gradient_predivide_factor": 2.0},
        "multiplied": {"gradient_predivide_factor": 0.25},
    }.items():
        losses = train_engine(make_engine(0, **config), 0, 3)
        engine = make_engine(0, net=Dot(), fp16={"enabled": True, "loss_scale": 1}, gradient_clipping=0, **config)
        engine.backward(engine(torch.full((4,), 40000.0)))
        engine.step()
        found[name] = (losses, engine.skipped_steps == 1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.full("2")
def test_gradients_may_be_divided_before_and_after_they_are_summed(world_size: int) -> None:
    for found in run_ranks(predivide, world_size):
        expected, overflows = found["neither"]
        assert not overflows
        assert {name: overflow for name, (_, overflow) in found.items()} == {
            "neither": False,
            "prescaled": False,
            "in two parts": False,
            "multiplied": True,
        }
        for losses, _ in found.values():
            assert losses == pytest.approx(expected, rel=1e-6)


def sum_up_low(world: World) -> dict[str, list[float]]:
    """The norm at stages 1 to 3, of sums that are kept in a lower precision."""
    found: dict[str, list[float]] = {}
    for (kind, asked), stage in itertools.product(LOW_SUMS, (1, 2, 3)):
        precision = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": {"enabled": True, "loss_scale": 1}}}[kind]
        for offload in (False, True):
            zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
            given: Any = {**precision, "zero_optimization": zero, "data_types": {"grad_accum_dtype": asked}}
            engine = make_engine(stage, net=Dot(), accumulation=4, gradient_clipping=0, **given)
            for _ in range(2):
                for value in MICRO:
                    engine.backward(engine(torch.full((4,), value)))
                    engine.step()
            found.setdefault(f"{kind} {asked}", []).append(float(engine.get_global_grad_norm() or 0))
    return found


LOW_SUMS = [("fp32", "bf16"), ("bf16", "bf16"), ("fp16", "bf16"), ("fp32", "fp16"), ("bf16", "fp16")]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_may_be_kept_in_a_lower_precision(world_size: int) -> None:
    for found in run_ranks(sum_up_low, world_size):
        for key, norms in found.items():
            # fp16 has the bits for these sums.
            assert norms == [ROUNDED if key.endswith("bf16") else WHOLE] * 6, key


class InLinear(nn.Module):
    """The same by a layer that autocast lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().sum()


def sum_up_lowered(world: World) -> dict[str | None, float]:
    found = {}
    for asked in (None, "fp32"):
        types = {"data_types": {"grad_accum_dtype": asked}} if asked else {}
        lower = {"enabled": True, "dtype": "bfloat16"}
        engine = make_engine(1, net=InLinear(), accumulation=4, torch_autocast=lower, gradient_clipping=0, **types)
        for value in MICRO:
            engine.backward(engine(torch.full((4,), value)))
            engine.step()
        found[asked] = engine.get_global_grad_norm()
    return found


@pytest.mark.slow
def test_what_autocast_sends_low_may_add_up_in_fp32() -> None:
    for found in run_ranks(sum_up_lowered, 2):
        assert found == {None: ROUNDED, "fp32": WHOLE}
