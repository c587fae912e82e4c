"""The processes of a job and their devices: joining the process group, and the data-parallel mesh.

Who divides the ranks into data-parallel and model-parallel ones is the matter of `mpu`.

Ranks that dsjob started itself meet through a file in a private folder, so that nothing listens beyond loopback;
ranks that torchrun or srun started meet as those say.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dsjob.errors import LaunchError

STORE_VARIABLE = "DSJOB_STORE"


class ModelRanks(NamedTuple):
    """This process among those that hold one model together, each a part of it."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that train on other data: all of the job's, unless a model-parallel unit divides them.

    `group`: these ranks, where they are not all of the job's. `loads`, `reports`: whether this one reads data, and
    whether its metrics count.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    model: ModelRanks = ModelRanks()  # noqa: RUF009 (a tuple)
    loads: bool = True
    reports: bool = True
    timeout: float = 1800.0  # seconds that a collective may take

    @property
    def everyone(self) -> World:
        """This process among all of the job's."""
        if self.group is None:
            return self
        return World(dist.get_rank(), self.local_rank, dist.get_world_size(), self.device, timeout=self.timeout)

    def ensure_group(self) -> None:
        """Makes the process group of a rank that is alone, where there is none yet."""
        if not dist.is_initialized():
            backend = _choose_backend("auto", self.device)
            dist.init_process_group(backend, store=HashStore(), rank=self.rank, world_size=self.world_size)

    def make_mesh(self, group: int = 0) -> DeviceMesh:
        """A mesh of one axis, `data`, over these ranks; of groups of `group` successive ones: `replica` and `data`."""
        self.ensure_group()
        if self.group is not None:
            assert not group  # the groups would have to be made by all ranks of the job together
            return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("data",))
        if not group:
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("data",))
        shape = (self.world_size // group, group)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replica", "data"))


def join_world(*, device: str = "auto", backend: str = "auto", timeout: float = 1800.0) -> World:
    """Joins the process group that the environment describes, once; alone where it describes none.

    `timeout`: seconds that a collective may take. Raises LaunchError where the group cannot be joined.
    """
    rank, world_size = _read_int("RANK", 0), _read_int("WORLD_SIZE", 1)
    local_rank = _read_int("LOCAL_RANK", 0)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    chosen = _choose_device(device, local_rank, _read_int("LOCAL_WORLD_SIZE", world_size))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size > 1 and not dist.is_initialized():
        _join_group(rank, world_size, _choose_backend(backend, chosen), timeout, chosen)
    return World(rank=rank, local_rank=local_rank, world_size=world_size, device=chosen, timeout=timeout)


def leave_world() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _read_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"environment variable {name}={text!r} is not a number") from None


def _choose_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if count == 1 and _gives_each_rank_a_gpu():
        return torch.device("cuda", 0)
    if local_world_size > count:
        raise LaunchError(
            f"each rank needs a GPU of its own: {local_world_size} on this machine, but {count} can be seen",
            hint="lower launch.nproc, or launch.device=cpu",
        )
    return torch.device("cuda", local_rank)


def _gives_each_rank_a_gpu() -> bool:
    """Whether Slurm shows each task its own GPU alone, which is then number 0 to all of them."""
    return "SLURM_GPUS_PER_TASK" in os.environ or "gres/gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")


def _choose_backend(wanted: str, device: torch.device) -> str:
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" else "gloo"


def _join_group(rank: int, world_size: int, backend: str, timeout: float, device: torch.device) -> None:
    store_path = os.environ.get(STORE_VARIABLE)
    if store_path is None and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            f"WORLD_SIZE is {world_size}, but MASTER_ADDR is not set",
            hint="start the ranks with launch.nproc, torchrun or srun",
        )
    store = FileStore(store_path, world_size) if store_path else None
    try:
        dist.init_process_group(
            backend,
            store=store,
            init_method=None if store else "env://",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(f"rank {rank} could not join the {backend} process group: {error}") from error
