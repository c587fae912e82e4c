"""The engine against DeepSpeed's own loss curves, at every stage."""

from typing import Any

import pytest
import torch
from engines import build_net, read_fixture
from ranks import run_ranks

import dsjob
from dsjob.ranks.mesh import World

TOLERANCE = {"fp32": 1e-4, "bf16": 4e-3}


def follow(world: World, dtype: str, every: int) -> list[tuple[str, float, float]]:
    """The largest differences of losses and of rates, for each run of the fixtures and each stage; or for every n-th
    stage, which is another one in the next run."""
    batches = read_fixture("batches.json")[str(world.data_rank)]
    found = []
    for number, run in enumerate(run for run in read_fixture("losses.json") if run["dtype"] == dtype):
        for stage in range(number % every, 4, every):
            config: dict[str, Any] = {**run["config"], "zero_optimization": {"stage": stage}}
            engine = dsjob.initialize(model=build_net(), config=config)[0]
            losses, rates = [], []
            for x, y in batches[: len(run["rank0_micro_losses"])]:
                loss = engine(torch.tensor(x), torch.tensor(y))
                losses.append(float(loss.detach()))
                engine.backward(loss)
                rates.append(engine.get_lr()[0])
                engine.step()
            name = f"stage {stage} against DeepSpeed's stage {run['stage']}, {run['scheduler']}, gas {run['gas']}"
            worst = max(abs(a - b) for a, b in zip(losses, run["rank0_micro_losses"], strict=True))
            found.append((name, worst, max(abs(a - b) for a, b in zip(rates, run["lr_before_step"], strict=True))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.full
def test_losses_follow_deepspeed_at_every_stage(dtype: str, every: int) -> None:
    found = run_ranks(follow, 2, dtype, every)[0]
    assert len(found) == (6 if dtype == "fp32" else 4) * 4 // every
    for name, loss_difference, rate_difference in found:
        assert loss_difference <= TOLERANCE[dtype], name
        assert rate_difference <= 1e-12, name
