"""The GPT of the recipes on Python's sources: the 1-bit optimizers end where AdamW ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

import dsjob
from dsjob.ranks.mesh import World
from dsjob.recipes.gpt import build
from dsjob.recipes.text import ByteText

ROWS = 8
COMMON: dict[str, Any] = {"betas": [0.9, 0.99], "eps": 1e-8}


def list_optimizers(steps: int) -> list[dict[str, Any]]:
    freeze, zero_one = {"freeze_step": steps // 4}, {"local_step_scaler": steps // 4, "local_step_clipper": 2}
    return [
        {"type": "AdamW", "params": {"lr": 3e-3, **COMMON}},
        {"type": "OneBitAdam", "params": {"lr": 3e-3, **COMMON, **freeze}},
        {"type": "ZeroOneAdam", "params": {"lr": 3e-3, **COMMON, "var_freeze_step": steps // 3, **zero_one}},
        {"type": "OneBitLamb", "params": {"lr": 1e-2, **COMMON, **freeze}},
    ]


def stack(data: ByteText, rows: list[int]) -> dict[str, torch.Tensor]:
    windows = [data[row] for row in rows]
    return {key: torch.stack([window[key] for window in windows]) for key in ("inputs", "targets")}


def train(world: World, steps: int, optimizers: list[dict[str, Any]]) -> list[float]:
    """The validation loss that each ends with."""
    params = {"total_num_steps": steps, "warmup_num_steps": steps // 12, "cos_min_ratio": 0.01}
    data, held_out = ByteText(context=48, max_bytes=400_000), ByteText("validation", context=48, max_bytes=30_000)
    losses = []
    for optimizer in optimizers:
        torch.manual_seed(0)
        engine = dsjob.initialize(
            model=build(context=48, layers=2, width=64, heads=4),
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_clipping": 1.0,
                "optimizer": optimizer,
                "scheduler": {"type": "WarmupCosineLR", "params": params},
            },
        )[0]
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            rows = torch.randint(len(data), (world.data_size * ROWS,), generator=generator).tolist()
            engine.backward(engine(**stack(data, rows[world.data_rank :: world.data_size]))["loss"])
            engine.step()
        with torch.no_grad():
            losses.append(float(engine.module(**stack(held_out, list(range(len(held_out)))))["loss"]))
    return losses


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("steps", "count", "reached"), [(300, 2, 2.3), (600, 4, 2.2)])
def test_a_gpt_ends_within_one_percent_of_adamws_loss(steps: int, count: int, reached: float) -> None:
    optimizers = list_optimizers(steps)[:count]
    for adam, *others in run_ranks(train, 2, steps, optimizers):
        assert adam < reached
        for optimizer, loss in zip(optimizers[1:], others, strict=True):
            assert loss < 1.01 * adam, optimizer["type"]
