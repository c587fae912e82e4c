"""Disks that are full or become read-only while a job runs, real ones, on one rank and on two: every rank is told, the
checkpoints before stay whole, and a job that trains on saves again once there is room."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from forks import get_forks
from small_disks import mount_own, remount, run_ranks_here
from small_jobs import at_step, list_steps, make_document, run

from dsjob.checkpoint.offline.verify import verify
from dsjob.errors import DsjobError
from dsjob.ranks.mesh import World

SIZE = 320 << 10
MODEL = {"_target_": "small_jobs.Net", "width": 512}  # 5 k parameters: a checkpoint of 80 kB


def train(world: World | None, folder: str, disk: str, hooks: list[Callable[..., None]], **checkpoint: Any) -> str:
    """Runs a job of 8 steps whose checkpoints are on `disk`; the error that it ends with on this rank."""
    small_jobs.MORE[:] = hooks
    ranks = world.data_size if world else 1
    sections = {"zero_optimization": {"stage": 2}} if ranks > 1 else {}
    options = {"every": 1, "keep": 0, "dir": f"{disk}/checkpoints", **checkpoint}
    try:
        run(make_document(folder, model=MODEL, checkpoint=options, **sections), world)
    except DsjobError as error:
        return f"{type(error).__name__}: {error.message}"
    return ""


def fill_up(world: World | None, folder: str, disk: str, policy: str, behind: bool) -> dict[str, Any]:
    """A job whose disk is full after a few steps, and which has room again for step 7 where it still runs."""
    more = at_step(7, lambda: remount(disk, size=SIZE * 8) if world is None or world.data_rank == 0 else None)
    ended = train(world, folder, disk, [more], save_on_error=policy, **{"async": behind})
    return {"ended": ended, "steps": list_steps(f"file://{disk}/checkpoints")}


def become_read_only(world: World | None, folder: str, disk: str) -> dict[str, Any]:
    """A job whose disk becomes read-only before step 3 is saved."""
    first = world is None or world.data_rank == 0
    if first:
        remount(disk, size=SIZE * 8)  # it must not be full before
    ended = train(world, folder, disk, [at_step(3, lambda: remount(disk, read_only=True) if first else None)])
    return {"ended": ended, "steps": list_steps(f"file://{disk}/checkpoints")}


def on_a_disk(
    pipe: Any, folder: str, world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...], then: bool
) -> None:
    """Calls `function(world, folder, disk, *arguments)` on ranks, and with `then` lets the job go on with more room."""
    torch.set_num_threads(1)
    disk = f"{folder}/disk"
    os.mkdir(disk)
    if not mount_own(disk, SIZE):
        pipe.send(None)
        return
    found = run_ranks_here(function, world_size, f"{folder}/store", f"{folder}/run", disk, *arguments)
    url = f"{disk}/checkpoints"
    damages = [damage for one in verify(url, every=True) for damage in one.damages]
    remount(disk, size=SIZE * 8)
    again = run_ranks_here(train, world_size, f"{folder}/store-2", f"{folder}/run", disk, []) if then else []
    names = [name for name in os.listdir(url) if name.startswith("step-")]
    pipe.send(
        {"ranks": found, "damages": damages, "again": again, "steps": list_steps(f"file://{url}"), "names": names}
    )


def call_on_a_disk(
    folder: Path, world_size: int, function: Callable[..., Any], *arguments: Any, then: bool = True
) -> dict[str, Any]:
    context = get_forks()
    ours, theirs = context.Pipe()
    process = context.Process(target=on_a_disk, args=(theirs, str(folder), world_size, function, arguments, then))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] | None = ours.recv()
    finally:
        process.join(10)
        process.kill()
    if found is None:
        pytest.skip("no file system may be mounted here")
    return found


@pytest.mark.slow
@pytest.mark.full("in the background-1", "waited for-1", "waited for-2")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("behind", [False, True], ids=["waited for", "in the background"])
def test_a_full_disk_ends_the_job_on_all_ranks_and_leaves_what_was_saved(
    tmp_path: Path, world_size: int, behind: bool
) -> None:
    found = call_on_a_disk(tmp_path, world_size, fill_up, "stop", behind)
    ranks = found["ranks"]
    assert all(rank == ranks[0] for rank in ranks), ranks
    assert ranks[0]["ended"].startswith("StorageError: cannot ")
    assert "No space left on device" in ranks[0]["ended"]
    assert ranks[0]["steps"] == list(range(1, len(ranks[0]["steps"]) + 1))
    assert 1 <= len(ranks[0]["steps"]) < 6
    assert found["damages"] == []
    assert found["again"] == [""] * world_size
    assert found["steps"] == list(range(1, 9))
    assert len(found["names"]) == 8


@pytest.mark.slow
@pytest.mark.full("1")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_job_that_is_to_train_on_does_and_saves_again_when_there_is_room(tmp_path: Path, world_size: int) -> None:
    found = call_on_a_disk(tmp_path, world_size, fill_up, "warn", False, then=False)
    assert [rank["ended"] for rank in found["ranks"]] == [""] * world_size
    assert found["damages"] == []
    steps = found["steps"]
    assert 1 in steps
    assert 6 not in steps
    assert steps[-2:] == [7, 8]
    assert len(found["names"]) == len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disk_that_becomes_read_only_ends_the_job_on_all_ranks(tmp_path: Path, world_size: int) -> None:
    found = call_on_a_disk(tmp_path, world_size, become_read_only)
    ranks = found["ranks"]
    assert all(rank == ranks[0] for rank in ranks), ranks
    assert "Read-only file system" in ranks[0]["ended"]
    assert ranks[0]["steps"] == [1, 2]
    assert found["damages"] == []
    assert found["again"] == [""] * world_size
    assert found["steps"][-1] == 8
