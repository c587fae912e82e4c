"""Jobs with parameters and optimizer state on a disk: their tasks, and disks that are full or fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jobs
import pytest
import small_jobs
import torch
from forks import get_forks
from ranks import run_ranks
from small_disks import mount_own, remount, run_ranks_here
from small_jobs import at_step, list_steps, make_document
from torch import Tensor, nn

from dsjob.errors import DsjobError
from dsjob.optim import on_disk
from dsjob.ranks.mesh import World, join_world

SET = {"_target_": "small_jobs.Data"}
DATA = {"train": SET, "eval": {**SET, "n": 21}, "test": {**SET, "n": 13}}


class Deep(small_jobs.Deep):
    """Blocks of 288 kB, and predictions as output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wide() for _ in range(3)])

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        out = self.out(x)
        return {"loss": ((out - y) ** 2).mean(), "logits": out}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.back = nn.Linear(8, 4096), nn.Linear(4096, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.relu(self.fc(x)))


def offload(where: str, folder: str) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": f"{folder}/scratch"}
    parameters = {"offload_param": {**place, "max_in_cpu": 0}}
    found = {"none": {}, "parameters": parameters, "state": {"offload_optimizer": place}}
    return {"stage": 3, **{**found, "both": {**parameters, "offload_optimizer": place}}[where]}


def run(folder: str, world: World, where: str, disk: str, **sections: Any) -> dict[int, float]:
    on_disk.SMALL = 1 << 10  # a rank's parts of these small matrices, too, go to the disk
    trainer = {"train_batch": 2 * world.data_size, "micro_batch": 2, **sections.pop("trainer", {})}
    given = {"model": {"_target_": "test_nvme_jobs.Deep"}, "data": DATA, "trainer": trainer, **sections}
    trust = small_jobs.TRUST
    small_jobs.TRUST = type(trust)(prefixes=("small_jobs", "test_nvme_jobs"), folders=trust.folders)
    return small_jobs.run(make_document(folder, zero_optimization=offload(where, disk), **given), world)


def perform(world: World, folder: str, where: str) -> None:
    """A job with all tasks, one that is resumed half-way, and an evaluation of a checkpoint."""
    run(f"{folder}/whole", world, where, folder, tasks=["train", "eval", "predict"])
    half = f"{folder}/half"
    run(half, world, where, folder, trainer={"max_steps": 4}, checkpoint={"every": 4})
    run(half, world, where, folder, tasks=["train", "eval"], checkpoint={"resume": "auto"})
    run(
        f"{folder}/evaluated",
        world,
        where,
        folder,
        tasks=["eval", "predict"],
        optimizer=None,
        scheduler=None,
        checkpoint={"resume": half},
    )


def read(folder: Path) -> dict[str, Any]:
    """The losses, metrics and predictions of jobs."""
    found: dict[str, Any] = {}
    for job in ("whole", "half", "evaluated"):
        found[f"{job} losses"] = small_jobs.read_losses(folder / job)
        found[f"{job} metrics"] = json.loads((folder / job / "result.json").read_text())["metrics"]
        for file in sorted((folder / job).glob("predictions-*")):
            found[f"{job} {file.name}"] = file.read_text()
    return found


@pytest.mark.parametrize(("world_size", "where"), [(2, "both"), (1, "parameters")])
@pytest.mark.full("2-both")
def test_tasks_and_resumed_runs_give_the_same_with_everything_on_a_disk(
    world_size: int, where: str, tmp_path: Path
) -> None:
    for place in ("none", where):
        (tmp_path / place).mkdir()
        run_ranks(perform, world_size, str(tmp_path / place), place)
    expected, found = read(tmp_path / "none"), read(tmp_path / where)
    assert len(expected) == 8
    assert {"half losses", "evaluated predictions-test.jsonl"} <= expected.keys()
    assert found == expected


def train(world: World | None, folder: str, where: str, disk: str) -> tuple[str, dict[int, float]]:
    """A job whose scratch file is on `disk`, and its checkpoints are not: its error, and its losses."""
    try:
        world = world or join_world(device="cpu")
        return "", run(folder, world, where, disk, checkpoint={"every": 1, "keep": 0, "resume": "auto"})
    except DsjobError as error:
        return f"{type(error).__name__}: {error.message}\n{error.hint}", {}


ROOM = 8 << 20  # bytes: the parameters take 0.8 MB, and AdamW's state twice as much
LITTLE = 512 << 10


def fill_disk(pipe: Any, folder: str, where: str) -> None:
    """A job that is stopped at step 3, goes on where the disk has too little room, and then where it has enough."""
    torch.set_num_threads(1)
    disk = f"{folder}/disk"
    os.mkdir(disk)
    if not mount_own(disk, ROOM):
        pipe.send(None)
        return

    def go_on(name: str, place: str = where) -> tuple[str, dict[int, float]]:
        found: tuple[str, dict[int, float]] = run_ranks_here(train, 1, "", f"{folder}/{name}", place, disk)[0]
        return found

    small_jobs.MORE[:] = [at_step(3, lambda: small_jobs.send(small_jobs.SIGTERM))]
    go_on("run")
    small_jobs.MORE.clear()
    remount(disk, size=LITTLE)
    second = go_on("run")
    remount(disk, size=ROOM)
    pipe.send((second, go_on("run"), go_on("whole", "none"), os.listdir(f"{disk}/scratch")))


@pytest.mark.parametrize("where", ["parameters", "state"])
@pytest.mark.full("state")
def test_a_disk_without_room_ends_the_job_and_loses_nothing(where: str, tmp_path: Path) -> None:
    ours, theirs = get_forks().Pipe()
    process = get_forks().Process(target=fill_disk, args=(theirs, str(tmp_path), where))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    finally:
        process.join(10)
        process.kill()
    if found is None:
        pytest.skip("no file system may be mounted here")
    (error, _), again, whole, left = found
    assert error.startswith("StorageError: cannot reserve ")
    assert f"bytes in {tmp_path}/disk/scratch: No space left on device\nfree space there" in error
    assert again == whole
    assert list(whole[1]) == list(range(1, 9))
    assert list_steps(tmp_path / "run") == list(range(1, 9))
    assert left == []


BREAKS = """
import errno, os
import my_model
from dsjob.callbacks import Callback
from torch import nn

class Net(my_model.Net):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.fc, block.out = nn.Linear(8, 8192), nn.Linear(8192, 8)

class Breaks(Callback):
    def on_step(self, run):
        def fail(*args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        if run.step == 3 and os.environ["RANK"] == "1":
            os.preadv = fail
"""


@pytest.mark.parametrize("where", ["parameters", "state"])
@pytest.mark.full("state")
def test_a_disk_that_fails_on_one_rank_ends_the_job_and_leaves_its_checkpoints(where: str, tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    jobs.make_job(
        tmp_path,
        model={"_target_": "breaks.Net"},
        callbacks={"breaks": {"_target_": "breaks.Breaks"}},
        zero_optimization=offload(where, str(tmp_path)),
        checkpoint={"every": 2, "keep": 0},
        launch={"nproc": 2},
    )
    ended = jobs.dsjob("run", "cfg.json", cwd=tmp_path)
    assert ended.returncode == 1
    assert "newest checkpoint is step-00000002; to resume: dsjob run run" in ended.stderr
    assert f"dsjob: error: rank 1: cannot read from {tmp_path}/scratch: Input/output error\n  check" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert jobs.list_commits(tmp_path / "run") == ["step-00000002"]
