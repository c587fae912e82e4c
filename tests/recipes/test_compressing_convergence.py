"""The GPT of the recipes on Python's sources: the 1-bit optimizers end where AdamW ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

import dsjob
from dsjob.mesh import World
from dsjob.recipes.gpt import build
from dsjob.recipes.text import ByteText

STEPS, ROWS, FREEZE = 600, 8, 150
COMMON: dict[str, Any] = {"betas": [0.9, 0.99], "eps": 1e-8}
SCHEDULE = {
    "type": "WarmupCosineLR",
    "params": {"total_num_steps": STEPS, "warmup_num_steps": 50, "cos_min_ratio": 0.01},
}
OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "AdamW", "params": {"lr": 3e-3, **COMMON}},
    {"type": "OneBitAdam", "params": {"lr": 3e-3, **COMMON, "freeze_step": FREEZE}},
    {"type": "OneBitLamb", "params": {"lr": 1e-2, **COMMON, "freeze_step": FREEZE}},
    {
        "type": "ZeroOneAdam",
        "params": {"lr": 3e-3, **COMMON, "var_freeze_step": 200, "local_step_scaler": 150, "local_step_clipper": 2},
    },
]


def stack(data: ByteText, rows: list[int]) -> dict[str, torch.Tensor]:
    windows = [data[row] for row in rows]
    return {key: torch.stack([window[key] for window in windows]) for key in ("inputs", "targets")}


def train(world: World, optimizers: list[dict[str, Any]]) -> list[float]:
    """The validation loss that each ends with."""
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
                "scheduler": SCHEDULE,
            },
        )[0]
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            rows = torch.randint(len(data), (world.world_size * ROWS,), generator=generator).tolist()
            engine.backward(engine(**stack(data, rows[world.rank :: world.world_size]))["loss"])
            engine.step()
        with torch.no_grad():
            losses.append(float(engine.module(**stack(held_out, list(range(len(held_out)))))["loss"]))
    return losses


@pytest.mark.slow
def test_a_gpt_ends_within_one_percent_of_adamws_loss() -> None:
    for adam, *others in run_ranks(train, 2, OPTIMIZERS):
        assert adam < 2.2
        for optimizer, loss in zip(OPTIMIZERS[1:], others, strict=True):
            assert loss < 1.01 * adam, optimizer["type"]
