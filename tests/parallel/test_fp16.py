"""fp16 on real ranks, and overflows of bf16: agreed, unscaled norms, stages against each other and against fp32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_net, make_engine, make_tokens, read_fixture, train_engine, whole_state
from ranks import run_ranks
from torch import Tensor, nn

import dsjob
from dsjob.engine.engine import Engine
from dsjob.engine.rhythm import MAX_SKIPPED
from dsjob.errors import LossScaleError, NonFiniteLossError
from dsjob.ranks.mesh import World

FP16: dict[str, Any] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
WARM: dict[str, Any] = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"},
}


class Spiky(nn.Module):
    """A loss that is multiplied by what the caller says: inf and nan reach the gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, factor: float) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.float().square().mean() * factor


def spike(engine: Engine, factor: float) -> None:
    for _ in range(engine.rhythm.accumulation):
        engine.backward(engine(torch.ones(2, 4) * 0.5, factor))
        engine.step()


def overflow_on_one_rank(world: World, accumulation: int) -> list[dict[str, Any]]:
    found = []
    for stage, section in [(stage, section) for stage in range(4) for section in (FP16, None)]:
        low: dict[str, Any] = {"fp16": section} if section else {"bf16": True}
        engine = make_engine(stage, net=Spiky(), accumulation=accumulation, scheduler=WARM, **low)
        spike(engine, 1.0)
        before, rate = whole_state(engine), engine.get_lr()
        last = world.data_rank == world.data_size - 1
        spike(engine, math.inf if last else 1.0)
        after, norm = whole_state(engine), engine.get_global_grad_norm()
        kept = all(torch.equal(before[name], after[name]) for name in before)
        skip = (engine.was_step_applied(), engine.loss_scale(), engine.skipped_steps, engine.get_lr() == rate)
        scale = 128.0 if section else 1.0
        counted = (engine.global_steps, engine.global_samples)
        spike(engine, 1.0)
        moved = not any(torch.equal(t, before[n]) for n, t in whole_state(engine).items() if "weight" in n)
        found.append(
            {
                "kept": kept,
                "skip": skip == (False, scale, 1, True),
                "counted": counted,
                "norm": math.isfinite(norm),
                "applied": engine.was_step_applied(),
                "moved": moved,
                "rate": engine.get_lr() != rate,
                "dtypes": {t.dtype for t in engine.state().optimizer_tensors().values()},
            }
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.full), (2, 3)])
def test_an_overflow_on_one_rank_is_a_skipped_step_on_all(world_size: int, accumulation: int) -> None:
    for found in run_ranks(overflow_on_one_rank, world_size, accumulation):
        for result in found:
            assert result == {
                "kept": True,
                "skip": True,
                "counted": (2, 2 * 2 * accumulation * world_size),
                "norm": False,
                "applied": True,
                "moved": True,
                "rate": True,
                "dtypes": {torch.float32},
            }


def test_bf16_steps_on_where_overflows_are_not_looked_for() -> None:
    engine = make_engine(0, net=Spiky(), bf16={"enabled": True, "check_grad_overflow": False})
    spike(engine, math.inf)
    assert (engine.was_step_applied(), engine.skipped_steps) == (True, 0)
    assert not bool(engine.module.blocks[0].weight.isfinite().all())  # type: ignore[index,union-attr]


@pytest.mark.parametrize("half", [{"bf16": True}, {"fp16": FP16}])
def test_the_norm_of_a_skipped_step_is_infinite_as_in_deepspeed(half: dict[str, Any]) -> None:
    engine = make_engine(0, net=Spiky(), **half)
    spike(engine, math.nan)
    assert not engine.was_step_applied()
    assert engine.get_global_grad_norm() == math.inf


def test_bf16_skips_for_a_while_and_not_for_ever() -> None:
    engine = make_engine(0, net=Spiky(), bf16=True)
    for _ in range(2):
        for _ in range(MAX_SKIPPED - 1):
            spike(engine, math.nan)
        spike(engine, 1.0)  # one that is taken begins the count anew
    for _ in range(MAX_SKIPPED - 1):
        spike(engine, math.nan)
    before, steps = whole_state(engine), 3 * MAX_SKIPPED
    message = f"{MAX_SKIPPED} steps in a row were skipped, up to step {steps}: gradients were not finite"
    with pytest.raises(NonFiniteLossError, match=message) as caught:
        spike(engine, math.nan)
    assert "set_detect_anomaly" in caught.value.hint
    assert (engine.global_steps, engine.skipped_steps) == (steps, steps - 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole_state(engine).items())


def exhaust(world: World) -> list[tuple[str, list[float]]]:
    said = []
    for stage in range(4):
        fp16 = {**FP16, "initial_scale_power": 1}
        engine = make_engine(stage, net=Spiky(), fp16=fp16)
        scales = []
        try:
            for _ in range(3):
                spike(engine, math.nan if world.data_rank == 0 else 1.0)
                scales.append(engine.loss_scale())
        except LossScaleError as error:
            said.append((error.message, scales))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_smallest_scale_ends_training_and_names_the_parameters(world_size: int) -> None:
    names = ", ".join(f"blocks.{block}.{kind}" for block in range(2) for kind in ("weight", "bias"))
    message = f"gradients overflowed fp16 at the smallest loss scale, 1, in {names}"
    for said in run_ranks(exhaust, world_size):
        assert said == [(message, [1.0])] * 4


def compare_stages(world: World, accumulation: int) -> dict[int, tuple[list[float], float, dict[str, Tensor]]]:
    """Of fp32 (-1) and of fp16 at each stage: losses, the last norm, weights."""
    found = {}
    for stage in (-1, 0, 1, 2, 3):
        fp16 = {"enabled": stage >= 0, "initial_scale_power": 12}
        engine = make_engine(max(stage, 0), accumulation=accumulation, fp16=fp16)
        losses = train_engine(engine, 0, 6)
        weights = {n: t for n, t in whole_state(engine).items() if n.startswith("model.")}
        assert engine.skipped_steps == 0
        found[stage] = (losses, engine.get_global_grad_norm(), weights)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "accumulation"),
    [(1, 3), (2, 1), (2, 3)],
)
@pytest.mark.full
def test_stages_agree_with_each_other_and_with_fp32(world_size: int, accumulation: int) -> None:
    for found in run_ranks(compare_stages, world_size, accumulation):
        exact, norm, weights = found.pop(-1)
        for losses, own_norm, own in found.values():
            assert losses == pytest.approx(exact, abs=5e-4)
            assert own_norm == pytest.approx(norm, rel=5e-4)
            for name, weight in weights.items():
                # Six steps of Adam at 0.01: where a gradient is all but zero, its sign is rounding's.
                difference = (own[name] - weight).abs()
                assert difference.max() < 0.06
                assert difference.mean() < 1e-3, name


def follow_fp32_curves(world: World, stages: tuple[int, ...]) -> list[tuple[str, float]]:
    """The largest difference from DeepSpeed's own fp32 losses, of fp16 at some stages."""
    batches, found = read_fixture("batches.json")[str(world.data_rank)], []
    for run in read_fixture("losses.json"):
        if run["dtype"] != "fp32" or run["stage"] not in (0, 3):
            continue
        for stage in stages:
            config = {**run["config"], "zero_optimization": {"stage": stage}, "fp16": {"enabled": True}}
            engine = dsjob.initialize(model=build_net(), config=config)[0]
            worst = 0.0
            for (x, y), theirs in zip(batches, run["rank0_micro_losses"], strict=False):
                loss = engine(torch.tensor(x), torch.tensor(y))
                worst = max(worst, abs(float(loss.detach()) - theirs))
                engine.backward(loss)
                engine.step()
            found.append((f"stage {stage} against stage {run['stage']}", worst))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(2,), pytest.param((0, 1, 3), marks=pytest.mark.full)])
def test_losses_stay_near_deepspeeds_in_fp32(stages: tuple[int, ...]) -> None:
    found = run_ranks(follow_fp32_curves, 2, stages)[0]
    assert len(found) == 2 * len(stages)
    for name, worst in found:
        assert worst < 5e-4, name


def resume(world: World, folder: str) -> list[bool]:
    """For each stage: whether a run that is broken off after an overflow goes on bit for bit."""
    same = []
    for stage in range(4):
        fp16 = {**FP16, "hysteresis": 2, "loss_scale_window": 3}
        make = lambda: make_engine(stage, net=Spiky(), fp16=fp16, scheduler=WARM)  # noqa: B023, E731
        factors = [1.0, math.inf, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0]
        whole, scales = make(), []
        for factor in factors:
            spike(whole, factor)
            scales.append((whole.loss_scale(), whole.skipped_steps, whole.global_steps, whole.get_lr()))
        first, again = make(), make()
        for factor in factors[:3]:
            spike(first, factor)
        first.save_checkpoint(f"{folder}/{stage}")
        again.load_checkpoint(f"{folder}/{stage}")
        seen = []
        for factor in factors[3:]:
            spike(again, factor)
            seen.append((again.loss_scale(), again.skipped_steps, again.global_steps, again.get_lr()))
        ours, theirs = whole_state(again), whole_state(whole)
        same.append(seen == scales[3:] and all(torch.equal(theirs[name], ours[name]) for name in theirs))
    return same


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.full("2")
def test_a_resumed_run_goes_on_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    for same in run_ranks(resume, world_size, str(tmp_path)):
        assert same == [True] * 4


def test_gradients_are_unscaled_before_the_norm_and_clipping() -> None:
    engine, plain = (
        make_engine(0, gradient_clipping=0.1, fp16={"enabled": on, "loss_scale": 1000 * on}) for on in (True, False)
    )
    x, y = make_tokens(0, 12)
    for each in (engine, plain):
        loss = each(x, y)
        assert each.backward(loss).item() == pytest.approx(4.0988, abs=1e-3)
        each.step()
    assert engine.get_global_grad_norm() == pytest.approx(plain.get_global_grad_norm(), rel=1e-3)
    assert engine.get_global_grad_norm() > 0.1
    assert (engine.loss_scale(), plain.loss_scale()) == (1000.0, 1.0)


def test_scale_is_for_a_backward_pass_of_the_callers_own() -> None:
    first, second = (make_engine(0, fp16=FP16) for _ in range(2))
    x, y = make_tokens(0, 12)
    first.backward(first(x, y))
    second.scale(second(x, y)).backward()
    for each in (first, second):
        each.step()
    assert first.get_global_grad_norm() == second.get_global_grad_norm() > 0


def test_a_step_is_unscaled_by_the_scale_of_its_own_backward_pass() -> None:
    """Also where the scale doubles: DeepSpeed divides by the new one there, which halves that update."""
    engine = make_engine(0, fp16={**FP16, "loss_scale_window": 1})
    plain = make_engine(0)
    for step in range(4):
        for each in (engine, plain):
            train_engine(each, step, 1)
        assert engine.get_global_grad_norm() == pytest.approx(plain.get_global_grad_norm(), rel=2e-2)
    assert engine.loss_scale() == 256 * 2**3
