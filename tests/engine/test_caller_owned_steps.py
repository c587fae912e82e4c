"""`managed_gradient_accumulation: false`: every call of step applies, however many backward passes came before."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from engines import make_deepspeed_engine, make_tokens, whole_state
from ranks import run_ranks

from dsjob.deepspeed import DeepSpeedEngine
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World

STAGES = (0, 1, 2, 3)
COUNTS = (2, 5, 1, 3)  # backward passes of each step
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
CASES: list[tuple[int, dict[str, Any]]] = [
    *((stage, {}) for stage in STAGES),
    (0, FP16),
    (3, FP16),
    (1, {"bf16": True, "data_types": {"grad_accum_dtype": "fp32"}}),
    (2, OFFLOADED),
]


def build(stage: int, *, managed: bool, **config: Any) -> DeepSpeedEngine:
    return make_deepspeed_engine(stage, accumulation=4, managed_gradient_accumulation=managed, **config)


def train(engine: DeepSpeedEngine, *, own: bool, counts: tuple[int, ...] = COUNTS) -> tuple[list[float], list[int]]:
    """Norms and samples so far of each step. `own`: backward passes are the program's."""
    managed = engine.rhythm.managed
    norms, samples = [], []
    for step, count in enumerate(counts):
        x, y = make_tokens(step, 2 * count * engine.world.data_size)
        for micro in range(count):
            if managed:
                engine.set_gradient_accumulation_boundary(micro == count - 1)
            else:
                assert not engine.is_gradient_accumulation_boundary()
            rows = slice(*((2 * (micro * engine.world.data_size + engine.world.data_rank) + k) for k in (0, 2)))
            loss = engine(x[rows], y[rows])
            if own:
                engine.scale(loss * 4 / count).backward()  # the engine divides by 4
            else:
                engine.backward(loss / count, scale_wrt_gas=False)
        engine.step()
        assert engine.was_step_applied()
        norms.append(engine.get_global_grad_norm())
        samples.append(engine.global_samples)
    return norms, samples


def compare(world: World) -> list[tuple[Any, ...]]:
    found = []
    for (stage, config), own in product(CASES, (False, True)):
        managed, unmanaged = build(stage, managed=True, **config), build(stage, managed=False, **config)
        expected, (norms, samples) = train(managed, own=own)[0], train(unmanaged, own=own)
        ours, theirs = whole_state(unmanaged), whole_state(managed)
        worst = max(float((ours[n].float() - theirs[n].float()).abs().max()) for n in ours)
        found.append((stage, config, own, expected, norms, samples, worst, unmanaged.micro_steps))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.full("2")
def test_steps_are_those_of_a_boundary_set_by_hand(world_size: int) -> None:
    for stage, config, own, expected, norms, samples, worst, micro_steps in run_ranks(compare, world_size)[0]:
        case = (stage, config, own)
        assert norms == pytest.approx(expected, rel=1e-5), case
        assert worst <= (0.05 if config.get("bf16") or "fp16" in config else 2e-6), case
        assert samples == [2 * world_size * sum(COUNTS[:n]) for n in range(1, len(COUNTS) + 1)], case
        assert micro_steps == len(COUNTS), case


def test_every_step_applies_and_the_loss_is_divided_by_the_accumulation_steps(tmp_path: Any) -> None:
    engine = build(0, managed=False)
    x, y = make_tokens(0, 2)
    loss = engine(x, y)
    assert torch.equal(engine.backward(loss), loss / 4)
    engine.step()
    assert (engine.global_steps, engine.global_samples, engine.was_step_applied()) == (1, 2, True)
    engine.save_checkpoint(tmp_path)
    again = build(0, managed=False)
    again.load_checkpoint(tmp_path)
    assert (again.global_steps, again.global_samples, again.micro_steps) == (1, 2, 1)


def test_what_speaks_of_another_boundary_is_refused() -> None:
    engine = build(2, managed=False)
    with pytest.raises(UsageError, match=r"set_gradient_accumulation_boundary\(\) is not supported"):
        engine.set_gradient_accumulation_boundary(True)
    with (
        pytest.raises(UsageError, match=r"coalesce_grad_reduction\(\) is not supported"),
        engine.coalesce_grad_reduction(),
    ):
        pass
    assert engine._syncs
