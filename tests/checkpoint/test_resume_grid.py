"""Every step as the one that a run goes on from: workers, accumulation, schedules, shuffling in mid-epoch, rates that
callbacks set.

One run saves after each of its steps; runs that begin at one of these checkpoints have to end as it did, bit for bit.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stateful
from small_jobs import make_document, read_digests, read_losses, run

STEPS = 40
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 12},
    "WarmupCosineLR": {"total_num_steps": STEPS, "warmup_num_steps": 6},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 11, "decay_step_size": 4},
}
OF_TORCH = {"ExponentialLR": {"gamma": 0.97}}
CASES = list(itertools.product((1, 3), SCHEDULES))


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[bytes]]:
    yield stateful.SEEN
    stateful.SEEN.clear()


def make(
    folder: Path, workers: int, accumulation: int, schedule: str, checkpoint: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """A job of 40 steps over 50 samples in a random order, with random transforms and dropout."""
    callbacks = {"patience": {"_target_": "stateful.Patience"}, **more.pop("callbacks", {})}
    return make_document(
        folder,
        model={"_target_": "stateful.Recording"},
        data={"train": {"_target_": "small_jobs.Data", "n": 50, "noisy": True}, "num_workers": workers},
        trainer={"micro_batch": 4, "train_batch": 4 * accumulation, "max_steps": STEPS},
        scheduler={"type": schedule, "params": {**SCHEDULES, **OF_TORCH}[schedule]},
        callbacks=callbacks,
        checkpoint=checkpoint,
        **more,
    )


def take_checkpoint(whole: Path, folder: Path, step: int) -> None:
    """What a run that was killed after `step` has left."""
    for name in (f"commits/step-{step:08d}.json", f"step-{step:08d}-a0001", "attempts"):
        source, target = whole / "checkpoints" / name, folder / "checkpoints" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def read_state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        next((folder / "checkpoints").glob(f"step-{STEPS:08d}-a*/state.json")).read_text()
    )
    return found


def require_exact(
    tmp_path: Path, workers: int, accumulation: int, schedule: str, steps: Iterable[int], **more: Any
) -> None:
    whole = tmp_path / "whole"
    run(make(whole, workers, accumulation, schedule, {"every": 1, "keep": 0}, **more))
    batches, losses = list(stateful.SEEN), read_losses(whole)
    digests, state = read_digests(whole, STEPS), read_state(whole)
    assert len(batches) == len(set(batches)) == STEPS * accumulation
    assert state["objects"]["callbacks.patience"][0]["values"]["seen"] == STEPS
    for step in steps:
        folder = tmp_path / f"from-{step}"
        take_checkpoint(whole, folder, step)
        stateful.SEEN.clear()
        run(make(folder, workers, accumulation, schedule, {}, **more))
        assert batches[step * accumulation :] == stateful.SEEN, step
        assert read_losses(folder) == {at: loss for at, loss in losses.items() if at > step}, step
        assert read_digests(folder, STEPS) == digests, step
        assert read_state(folder) == state, step
        shutil.rmtree(folder)


@pytest.mark.parametrize(("number", "accumulation", "schedule"), [(i, *case) for i, case in enumerate(CASES)])
@pytest.mark.full("1-1-WarmupCosineLR", "4-3-WarmupCosineLR", "0-1-WarmupLR", "2-1-OneCycle", "5-3-OneCycle")
def test_every_second_step_in_one_of_the_cases(tmp_path: Path, number: int, accumulation: int, schedule: str) -> None:
    require_exact(tmp_path, 0, accumulation, schedule, range(1 + number, STEPS, 2 * len(CASES)))


def test_steps_with_worker_processes(tmp_path: Path) -> None:
    require_exact(tmp_path, 2, 3, "WarmupCosineLR", (33,))


@pytest.mark.parametrize("schedule", [*SCHEDULES, *OF_TORCH])
@pytest.mark.full("WarmupCosineLR", "ExponentialLR", "OneCycle")
def test_rates_and_betas_that_a_callback_sets(tmp_path: Path, schedule: str) -> None:
    """Before the schedule's next step, which is all that some of them are for, and as tensors."""
    tuning = {"tuning": {"_target_": "stateful.Tuning"}}
    require_exact(tmp_path, 0, 1, schedule, (3, 6, 8, 21), callbacks=tuning)


@pytest.mark.full
@pytest.mark.parametrize(("accumulation", "schedule"), CASES)
@pytest.mark.parametrize("workers", [0, 2])
def test_each_step_in_every_case(tmp_path: Path, workers: int, accumulation: int, schedule: str) -> None:
    require_exact(tmp_path, workers, accumulation, schedule, range(1, STEPS))
