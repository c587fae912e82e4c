"""Saves of several ranks: in the background, with a rank that fails, at a signal to one of them, exactly resumed."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from ranks import run_ranks
from small_jobs import at_step, list_steps, make_document, read_digests, run, send

from dsjob import initialize, storage
from dsjob.checkpoint.live import background
from dsjob.errors import DsjobError, StorageError
from dsjob.ranks.mesh import World
from dsjob.training import occasions

STAGE_3 = {"zero_optimization": {"stage": 3}}


def attempt(document: dict[str, Any], world: World, *hooks: Callable[..., None]) -> str:
    """Runs a job; the error that it ends with on this rank."""
    small_jobs.MORE[:] = hooks
    try:
        run(document, world)
    except DsjobError as error:
        return f"{type(error).__name__}: {error.message}"
    finally:
        small_jobs.MORE.clear()
    return ""


def fail_to_write(step: int) -> None:
    original = storage.open_write

    def open_write(url: str) -> Any:
        if f"step-{step:08d}" in url:
            raise StorageError("no space")
        return original(url)

    storage.open_write = open_write


def flip_records(times: int) -> None:
    """Lets a bit of ranks' completion records flip on their way, so many times."""
    original, left = storage.read_bytes, [times]

    def read_bytes(url: str, start: int | None = None, end: int | None = None) -> bytes:
        data = original(url, start, end)
        if "/done/" not in url or not left[0]:
            return data
        left[0] -= 1
        place = data.index(b"sha256") + 12
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    storage.read_bytes = read_bytes


def run_all(world: World, folder: str) -> dict[str, Any]:
    """Every case in one world, which is what costs time."""
    occasions._SECONDS = 0.0  # ranks agree after every step, however short
    found: dict[str, Any] = {}
    sections = {"trainer": {"max_steps": 8}, **STAGE_3}
    every = {"every": 2, "keep": 0}
    found["whole"] = attempt(make_document(f"{folder}/whole", **sections, checkpoint=every), world)
    behind = {**every, "async": True}
    found["behind"] = attempt(make_document(f"{folder}/behind", **sections, checkpoint=behind), world)

    term = at_step(3, lambda: send(signal.SIGTERM)) if world.data_rank == 1 else at_step(0, lambda: None)
    document = make_document(f"{folder}/term", **sections, checkpoint=behind)
    found["term"] = attempt(document, world, term)
    found["term again"] = attempt(document, world)

    original = storage.open_write
    for name, options in (("fails", every), ("fails behind", behind)):
        for policy in ("stop", "warn"):
            if world.data_rank == 1:
                fail_to_write(4)
            options = {**options, "save_on_error": policy}
            key = f"{name} {policy}"
            found[key] = attempt(make_document(f"{folder}/{key}", **sections, checkpoint=options), world)
            storage.open_write = original

    background.PAUSES = (0.01, 0.1)
    read = storage.read_bytes
    for name, times in (("flips", 2), ("flips on", 1 << 30)):
        flip_records(times)
        found[name] = attempt(make_document(f"{folder}/{name}", **sections, checkpoint=behind), world)
        storage.read_bytes = read
    for steps in (4, 8):  # each rank has something of its own to keep
        found[f"own {steps}"] = attempt(make_own(f"{folder}/own", steps), world)
    found["unlike"] = attempt(make_unlike(f"{folder}/unlike"), world)
    return found


def make_own(folder: str, steps: int) -> dict[str, Any]:
    callbacks = {"own": {"_target_": "stateful.OwnNumber"}}
    return make_document(folder, trainer={"max_steps": steps}, **STAGE_3, callbacks=callbacks)


def make_unlike(folder: str) -> dict[str, Any]:
    """A job whose ranks judge differently of what can be kept."""
    names = ("FailsOnRank1", "make_unlike", "OwnNumber")
    callbacks = {name.lower(): {"_target_": f"stateful.{name}"} for name in names}
    return make_document(folder, trainer={"max_steps": 4}, **STAGE_3, callbacks=callbacks, checkpoint={"every": 2})


@pytest.mark.slow
def test_ranks_save_together_or_fail_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run_ranks(run_all, 2, str(tmp_path))
    assert first == second, "an error of one rank is one of all"
    assert first["whole"] == first["behind"] == ""
    for step in (2, 4, 6, 8):
        assert read_digests(tmp_path / "behind", step) == read_digests(tmp_path / "whole", step)

    assert first["term"].startswith("Preempted: stopped by SIGTERM after step ")
    assert first["term again"] == ""
    assert read_digests(tmp_path / "term", 8) == read_digests(tmp_path / "whole", 8)

    for name in ("fails", "fails behind"):
        assert first[f"{name} stop"] == "StorageError: no space"
        assert list_steps(tmp_path / f"{name} stop") == [2]
        assert first[f"{name} warn"] == ""
        assert list_steps(tmp_path / f"{name} warn") == [2, 6, 8]
        folders = os.listdir(tmp_path / f"{name} warn" / "checkpoints")
        assert not [folder for folder in folders if folder.startswith("step-00000004")]
        assert read_digests(tmp_path / f"{name} warn", 8) == read_digests(tmp_path / "whole", 8)

    assert first["flips"] == ""
    assert read_digests(tmp_path / "flips", 2) == read_digests(tmp_path / "whole", 2)
    assert first["flips on"].startswith("CorruptCheckpointError: ")
    assert first["flips on"].endswith("done/r00001.json is damaged: it does not match the digest that rank 1 wrote")
    assert list_steps(tmp_path / "flips on") == []
    assert first["own 4"] == first["own 8"] == ""
    assert read_own(tmp_path / "own", 8) == [[10 * step + rank for step in range(1, 9)] for rank in range(2)]
    run(make_own(f"{tmp_path}/own", 9))
    told = "callbacks.own resumes with rank 0's state on all ranks: it was saved on 2 ranks"
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown
    assert "at step 8; random generators were reseeded" in shown
    assert read_own(tmp_path / "own", 9) == [[10 * step for step in range(1, 10)]]
    assert first["unlike"] == ""
    for step in (2, 4):
        assert list(read_objects(tmp_path / "unlike", step)) == ["callbacks.ownnumber"]


def read_objects(folder: Path, step: int) -> dict[str, Any]:
    state = json.loads(next((folder / "checkpoints").glob(f"step-{step:08d}-a*/state.json")).read_text())
    found: dict[str, Any] = state["objects"]
    return found


def read_own(folder: Path, step: int) -> list[list[int]]:
    """The numbers that each rank has kept."""
    return [of_rank["values"]["numbers"] for of_rank in read_objects(folder, step)["callbacks.own"]]


def resume_everywhere(world: World, folder: str, workers: int, ends: Sequence[int]) -> None:
    """A run without interruption, then runs that end at some of its steps and are continued."""
    occasions._SECONDS = 0.0
    sections: dict[str, Any] = {
        "data": {"train": {"_target_": "small_jobs.Data", "noisy": workers > 0}, "num_workers": workers},
        "trainer": {"train_batch": 8, "grad_accum": 2, "max_steps": 8},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"every": 1, "keep": 0},
    }
    run(make_document(f"{folder}/whole", **sections), world)
    for end in ends:
        document = make_document(f"{folder}/{end}", **sections)
        assert "Preempted" in attempt(document, world, at_step(end, lambda: send(signal.SIGTERM)))
        run(document, world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "workers", "ends"),
    [
        (2, 0, (1, 4)),
        *(
            pytest.param(*other, marks=pytest.mark.full)
            for other in ((1, 0, range(1, 7)), (2, 0, range(1, 7)), (1, 2, (3, 6)), (2, 2, (3, 6)))
        ),
    ],
)
@pytest.mark.full
def test_a_run_that_ends_anywhere_goes_on_bit_for_bit(
    tmp_path: Path, world_size: int, workers: int, ends: Sequence[int]
) -> None:
    run_ranks(resume_everywhere, world_size, str(tmp_path), workers, ends)
    whole = read_digests(tmp_path / "whole", 8)
    continued = [path for path in tmp_path.iterdir() if path.name != "whole"]
    assert len(continued) == len(ends)
    for folder in continued:
        assert read_digests(folder, 8) == whole, folder


def save_16_bit(world: World, folder: str) -> tuple[bool, list[str]]:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}}
    engine, *_ = initialize(model=torch.nn.Linear(4, 2), config=config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = engine.save_16bit_model(folder)
    return saved, [str(each.message) for each in caught]


def test_a_16_bit_model_that_is_not_saved_is_told_on_rank_0(tmp_path: Path) -> None:
    first, second = run_ranks(save_16_bit, 2, str(tmp_path))
    assert (first[0], second) == (False, (False, []))
    assert "save_16bit_model needs zero_optimization.stage3_gather_16bit_weights_on_model_save" in first[1][0]
