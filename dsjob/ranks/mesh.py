"""The processes of a job and their devices: joining the process group, and the data-parallel mesh.

Who divides the ranks into data-parallel and model-parallel ones is the matter of `mpu`.

Ranks that dsjob started itself meet through a file in a private folder, so that nothing listens beyond loopback;
ranks that torchrun or srun started meet as those say.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh

from dsjob.errors import LaunchError
from dsjob.ranks.axes import Axes, build_mesh
from dsjob.ranks.meeting import STORE_VARIABLE, open_store
from dsjob.torch_private import list_process_groups


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among ranks that work together: its place there, and how many they are.

    `group`: what they communicate in; None for all ranks of the job, or where this process is alone.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    timeout: float = 1800.0  # seconds that a collective may take


@dataclass(frozen=True, slots=True)
class World:
    """This process in a job: its device, and its place among the ranks.

    Those that train on other data are all of the job's, unless a model-parallel unit divides them; then `model` are the
    ranks that hold one model together. `data_group`: what the data-parallel ranks communicate in, where they are not
    all of the job's. `loads`, `reports`: whether this one reads data, and whether its metrics count. `copies`: of the
    sharded state, each on `data_size / copies` ranks. `order`: the job's ranks as the mesh has them, if it is not 0, 1,
    2, ...
    """

    data_rank: int
    local_rank: int
    data_size: int
    device: torch.device
    data_group: dist.ProcessGroup | None = None
    model: Ranks = Ranks()
    loads: bool = True
    reports: bool = True
    timeout: float = 1800.0  # seconds that a collective may take
    copies: int = 1
    order: tuple[int, ...] = ()

    @property
    def data(self) -> Ranks:
        """This process among those that train on other data."""
        return Ranks(self.data_rank, self.data_size, self.data_group, self.timeout)

    @property
    def everyone(self) -> Ranks:
        """This process among all of the job's."""
        if self.data_group is None:
            return self.data
        return Ranks(dist.get_rank(), dist.get_world_size(), timeout=self.timeout)

    @property
    def axes(self) -> Axes:
        """The size of the mesh along each axis."""
        return Axes(replicate=self.copies, shard=self.data_size // self.copies, tensor=self.model.size)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the job, with all axes of `Axes`. All ranks ask for it together, since it may need new groups.

        It is built when it is first asked for: a job that neither shards nor divides its ranks never needs it.
        """
        self.ensure_group()
        groups = {"shard": self.data_group, "tensor": self.model.group}
        known = {name: group for name, group in groups.items() if group is not None}
        key = (dist.group.WORLD, self.device.type, self.axes, self.order, *known.values())
        if key not in _meshes:
            # Groups of an earlier world are of no use, and would keep its connections open.
            for stale in [other for other in _meshes if other[0] is not dist.group.WORLD]:
                del _meshes[stale]
            _meshes[key] = build_mesh(self.axes, self.device.type, ranks=self.order, groups=known)
        return _meshes[key]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The part of `mesh` that a model's state is spread over, as FSDP2 takes it.

        One axis, `shard`; with copies two of them, [replicate, shard].
        """
        return self.mesh["replicate", "shard"] if self.copies > 1 else self.mesh["shard"]

    def ensure_group(self) -> None:
        """Makes the process group of a rank that is alone, where there is none yet."""
        if not dist.is_initialized():
            backend = _choose_backend("auto", self.device)
            dist.init_process_group(backend, store=HashStore(), rank=self.data_rank, world_size=self.data_size)


# Built once, since each would make groups of its own. Keys hold what is the same on all ranks, or needs no new groups:
# otherwise one rank would build a mesh where another has it already, and wait.
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def join_world(*, device: str = "auto", backend: str = "auto", timeout: float = 1800.0) -> World:
    """Joins the process group that the environment describes, once; alone where it describes none.

    `timeout`: seconds that a collective may take. Raises LaunchError where the group cannot be joined.
    """
    rank, world_size = _read_int("RANK", 0), _read_int("WORLD_SIZE", 1)
    local_rank = _read_int("LOCAL_RANK", 0)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    # LOCAL_SIZE is the deepspeed launcher's. Where neither is set (a PyTorchJob's pods), nobody says how many are here.
    chosen = _choose_device(device, local_rank, _read_int("LOCAL_WORLD_SIZE", _read_int("LOCAL_SIZE", 0)))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size > 1:
        _allow_connections(world_size)
    if world_size > 1 and not dist.is_initialized():
        _join_group(rank, world_size, _choose_backend(backend, chosen), timeout, chosen)
    return World(data_rank=rank, local_rank=local_rank, data_size=world_size, device=chosen, timeout=timeout)


def _allow_connections(world_size: int) -> None:
    """Raises how many files this process may open, often 1,024: gloo keeps a connection to each other rank."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 + 4 * world_size
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def leave_world() -> None:
    """Leaves the process group, if there is one."""
    _meshes.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon_world() -> None:
    """Drops the process group of a run that has failed, if there is one: other ranks that wait in it get an error."""
    _meshes.clear()
    if dist.is_initialized():
        for group in list_process_groups():
            group.abort()
        dist.destroy_process_group()
        gc.collect()  # an engine, which refers to itself, may hold connections


def _read_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"environment variable {name}={text!r} is not a number") from None


def _choose_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    """The device of this rank. `local_world_size`: ranks on this machine; 0 where nobody says.

    Each rank decides alone. Where two decide for one GPU, NCCL refuses to start (see `_join_group`).
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if count and torch.cuda.is_initialized() and torch.cuda.current_device():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())  # the program has called torch.cuda.set_device
    if count == 1 and _sees_its_own_gpu(local_rank):
        return torch.device("cuda", 0)
    ranks = max(local_rank + 1, local_world_size)
    if ranks > count:
        raise LaunchError(
            f"found {count} GPU{'s' * (count != 1)} for {ranks} rank{'s' * (ranks > 1)} on this machine; "
            "each rank needs a GPU of its own",
            hint="lower launch.nproc, or launch.device=cpu",
        )
    return torch.device("cuda", local_rank)


def _sees_its_own_gpu(local_rank: int) -> bool:
    """Whether the one GPU that this rank sees is its own, not one that all ranks of the machine see.

    srun shows each task its GPU alone (--gpus-per-task, --gpu-bind=single:1), without always saying so; it may as well
    show all tasks the same one. torchrun --virtual-local-rank gives every rank the local rank 0 and one GPU.
    """
    by_srun = "SLURM_PROCID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    virtual = "TORCHELASTIC_RUN_ID" in os.environ and local_rank == 0 and bool(listed) and "," not in listed
    return by_srun or virtual


def _choose_backend(wanted: str, device: torch.device) -> str:
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" else "gloo"


def _join_group(rank: int, world_size: int, backend: str, timeout: float, device: torch.device) -> None:
    if STORE_VARIABLE not in os.environ and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            f"WORLD_SIZE is {world_size}, but MASTER_ADDR is not set",
            hint="start the ranks with launch.nproc, torchrun or srun",
        )
    try:
        dist.init_process_group(
            backend,
            store=open_store(rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        if "Duplicate GPU" in str(error):
            raise LaunchError(
                f"rank {rank} has no GPU of its own: two ranks of this machine see the same one alone",
                hint="give each rank one (srun --gpus-per-task=1), or show all ranks all GPUs",
            ) from error
        raise LaunchError(f"rank {rank} could not join the {backend} process group: {error}") from error
