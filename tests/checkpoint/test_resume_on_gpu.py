"""A run that goes on draws the numbers that the unbroken one drew: dropout and named states of the generator of its
device. On the CPU too, so that the test itself is tried where there is no GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_jobs import make_document, read_digests, read_losses, run

from dsjob.compute.activation.rng import TRACKER
from dsjob.ranks.mesh import join_world

STEPS, BROKEN = 8, 5


@pytest.fixture(autouse=True)
def tracker() -> Iterator[None]:
    TRACKER.reset()
    yield
    TRACKER.reset()


def train(folder: Path, device: str, steps: int, bf16: bool) -> None:
    document = make_document(
        folder,
        model={"_target_": "stateful.Masked"},
        trainer={"micro_batch": 4, "train_batch": 8, "max_steps": steps},
        bf16={"enabled": bf16},
    )
    run(document, join_world(device=device))


def read_state(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "checkpoints").glob(f"step-{STEPS:08d}-a*/state.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, device: str, bf16: bool) -> None:
    train(tmp_path / "whole", device, STEPS, bf16)
    TRACKER.reset()
    train(tmp_path / "broken", device, BROKEN, bf16)
    TRACKER.reset()
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # that of torch is for all devices
        seed(99)
    train(tmp_path / "broken", device, STEPS, bf16)
    assert read_losses(tmp_path / "broken") == read_losses(tmp_path / "whole")
    assert read_digests(tmp_path / "broken", STEPS) == read_digests(tmp_path / "whole", STEPS)
    state = read_state(tmp_path / "whole")
    assert read_state(tmp_path / "broken") == state
    assert {device if device == "cuda" else "torch", "tracked"} <= state["rng"]["0"].keys()
