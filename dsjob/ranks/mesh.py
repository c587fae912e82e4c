"""The processes of a job and their devices: joining the process group, and the data-parallel mesh.

`mpu` divides the ranks into data-parallel and model-parallel ones.

Ranks that dsjob launched find each other through a file in a private folder, so that nothing listens beyond loopback.
Ranks that torchrun or srun launched use the environment variables that these set.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh

from dsjob.errors import LaunchError
from dsjob.ranks.axes import Axes, build_mesh
from dsjob.ranks.heap import keep_freed_memory
from dsjob.ranks.meeting import STORE_VARIABLE, open_store
from dsjob.torch_private import list_process_groups


@dataclass(frozen=True, slots=True)
class Ranks:
    """The position of this process in a group of ranks, and the size of that group.

    `group`: the process group; None for all ranks of the job, or for a process on its own.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    timeout: float = 1800.0  # of a collective, in seconds


@dataclass(frozen=True, slots=True)
class World:
    """The device of this process and its position among the ranks of the job.

    All ranks are data-parallel unless `ranks.divide` or a model-parallel unit (`ranks.mpu`) divides them. Then a model
    is spread over the ranks of `model`, and each data-parallel rank stands for one such group.
    """

    data_rank: int
    local_rank: int
    data_size: int
    device: torch.device
    data_group: dist.ProcessGroup | None = None  # None: all ranks of the job are data-parallel
    model: Ranks = Ranks()  # the ranks that together hold one copy of the model: pipe x context x tensor
    pipe: Ranks = Ranks()  # the ranks that hold the other stages of this rank's part of each layer
    context: Ranks = Ranks()  # the ranks that compute other parts of the same sequences
    tensor: Ranks = Ranks()  # the ranks that hold the other parts of the same layers
    opaque: bool = False  # an mpu of the program divides the layers, in a way that only the program knows
    loads: bool = True  # whether this rank reads data
    reports: bool = True  # whether the metrics of this rank count
    timeout: float = 1800.0  # of a collective, in seconds
    copies: int = 1  # of the sharded state; each is spread over data_size / copies ranks
    order: tuple[int, ...] = ()  # the ranks of the job in mesh order; empty: 0, 1, 2, ...

    @property
    def data(self) -> Ranks:
        """The data-parallel ranks."""
        return Ranks(self.data_rank, self.data_size, self.data_group, self.timeout)

    @property
    def everyone(self) -> Ranks:
        """All ranks of the job."""
        if self.data_group is None:
            return self.data
        return Ranks(dist.get_rank(), dist.get_world_size(), timeout=self.timeout)

    @property
    def parts(self) -> Ranks:
        """The ranks whose parts of the model have names of their own in checkpoints, and are never resharded."""
        return self.tensor if self.opaque else Ranks()

    @property
    def divided(self) -> bool:
        """Whether dsjob divides the model, or its sequences, among ranks."""
        return self.model.size > 1 and not self.opaque

    @property
    def axes(self) -> Axes:
        """The size of the mesh along each axis."""
        shard = self.data_size // self.copies
        return Axes(self.pipe.size, self.copies, shard, self.context.size, self.tensor.size)

    def along(self, axis: str) -> Ranks:
        """This rank's position along an axis of the mesh, and its group there. A collective for `replicate` and `shard`
        if there are several copies, since it may build the mesh."""
        if axis in ("pipe", "context", "tensor"):
            found: Ranks = getattr(self, axis)
            return found
        if self.copies == 1:
            return self.data if axis == "shard" else Ranks(timeout=self.timeout)
        group = self.mesh.get_group(axis)
        return Ranks(dist.get_rank(group), dist.get_world_size(group), group, self.timeout)

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the job, with all axes of `Axes`. A collective, because building it may create groups.

        It is built on first use: a job that neither shards nor divides its ranks never needs it.
        """
        self.ensure_group()
        # The groups of divided ranks exist already. Otherwise, building the mesh creates them.
        groups = {
            "shard": self.data_group,
            "pipe": self.pipe.group,
            "context": self.context.group,
            "tensor": self.tensor.group,
        }
        known = {name: group for name, group in groups.items() if group is not None}
        key = (dist.group.WORLD, self.device.type, self.axes, self.order, *known.values())
        if key not in _meshes:
            # Drop meshes of an earlier process group: they are useless, and keep its connections open.
            for stale in [other for other in _meshes if other[0] is not dist.group.WORLD]:
                del _meshes[stale]
            _meshes[key] = build_mesh(self.axes, self.device.type, ranks=self.order, groups=known, timeout=self.timeout)
        return _meshes[key]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The submesh that FSDP2 shards the model over: [shard], or [replicate, shard] with several copies."""
        return self.mesh["replicate", "shard"] if self.copies > 1 else self.mesh["shard"]

    def ensure_group(self) -> None:
        """Creates a process group of one rank if there is no group yet. Has no effect otherwise."""
        if not dist.is_initialized():
            backend = _choose_backend("auto", self.device)
            dist.init_process_group(backend, store=HashStore(), rank=self.data_rank, world_size=self.data_size)


# Each mesh is built only once, because building it creates process groups. Either the parts of a key are equal on all
# ranks, or the mesh needs no new groups. Otherwise one rank would build a mesh that another already has, and hang.
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def join_world(
    *,
    device: str = "auto",
    backend: str = "auto",
    timeout: float = 1800.0,
    initialize: Callable[..., Any] | None = None,
) -> World:
    """Joins the process group that the environment describes, unless this process has joined one. Without such an
    environment, this process is the only rank.

    `timeout`: of a collective, in seconds. `initialize`: replaces torch's `init_process_group`, and is called with the
    same keyword arguments. Raises LaunchError if the group cannot be joined.
    """
    rank, world_size = _read_int("RANK", 0), _read_int("WORLD_SIZE", 1)
    local_rank = _read_int("LOCAL_RANK", 0)
    if dist.is_initialized():
        # The program has formed its own process group, which may differ from the environment.
        rank, world_size = dist.get_rank(), dist.get_world_size()
    # The deepspeed launcher sets LOCAL_SIZE. The pods of a PyTorchJob set neither, so the number of ranks is unknown.
    chosen = _choose_device(device, local_rank, _read_int("LOCAL_WORLD_SIZE", _read_int("LOCAL_SIZE", 0)))
    if chosen.type == "cuda":
        # Otherwise, "cuda" without an index would mean GPU 0 on every rank.
        torch.cuda.set_device(chosen)
    if world_size > 1:
        # Before joining, since gloo connects all ranks with each other then.
        _allow_connections(world_size)
        if chosen.type == "cpu":
            keep_freed_memory()
    if world_size > 1 and not dist.is_initialized():
        _join_group(rank, world_size, _choose_backend(backend, chosen), timeout, chosen, initialize)
    end_gloo_at_exit()
    return World(data_rank=rank, local_rank=local_rank, data_size=world_size, device=chosen, timeout=timeout)


def _allow_connections(world_size: int) -> None:
    """Raises the limit on open files, often 1,024: gloo keeps a connection to every other rank."""
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


@cache  # once
def end_gloo_at_exit() -> None:
    """Leaves groups of gloo when this process exits, in case the program does not.

    gloo's threads free the tensors of the last collectives. If they do so after the interpreter has begun to shut
    down, Python ends them in the midst of C++, which aborts the process.
    """
    atexit.register(_end_gloo, os.getpid())


def _end_gloo(process: int) -> None:
    if not dist.is_initialized() or os.getpid() != process:  # a fork has no threads of gloo, and would wait for them
        return
    if dist.get_backend() == "gloo":
        leave_world()
        return
    for group in list_process_groups():
        if dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)


def abandon_world() -> None:
    """Aborts the process group of a failed run, if there is one, so that ranks waiting in it get an error."""
    _meshes.clear()
    if dist.is_initialized():
        for group in list_process_groups():
            group.abort()
        dist.destroy_process_group()
        gc.collect()  # engines hold connections, and their reference cycles would keep them open


def _read_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"environment variable {name}={text!r} is not a number") from None


def _choose_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    """The device of this rank. `local_world_size`: ranks on this machine; 0 if unknown.

    Each rank decides on its own. If two ranks choose the same GPU, NCCL refuses to start (see `_join_group`).
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
            hint="lower launch.nproc, or set launch.device=cpu",
        )
    return torch.device("cuda", local_rank)


def _sees_its_own_gpu(local_rank: int) -> bool:
    """Whether the only visible GPU belongs to this rank alone, rather than being visible to all ranks of the machine.

    srun can show each task only its own GPU (--gpus-per-task, --gpu-bind=single:1), without setting a variable that
    says so, but it can also show the same one to all tasks. torchrun --virtual-local-rank gives every rank the local
    rank 0 and one GPU.
    """
    by_srun = "SLURM_PROCID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    virtual = "TORCHELASTIC_RUN_ID" in os.environ and local_rank == 0 and bool(listed) and "," not in listed
    return by_srun or virtual


def _choose_backend(wanted: str, device: torch.device) -> str:
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" else "gloo"


def _join_group(
    rank: int,
    world_size: int,
    backend: str,
    timeout: float,
    device: torch.device,
    initialize: Callable[..., Any] | None,
) -> None:
    if STORE_VARIABLE not in os.environ and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            f"WORLD_SIZE is {world_size}, but MASTER_ADDR is not set",
            hint="start the ranks with launch.nproc, torchrun or srun",
        )
    given: dict[str, Any] = {
        "backend": backend,
        "store": open_store(rank, world_size, timeout),
        "rank": rank,
        "world_size": world_size,
        "timeout": timedelta(seconds=timeout),
        "device_id": device if device.type == "cuda" else None,
    }
    if initialize is not None:
        initialize(**given)
        return
    try:
        dist.init_process_group(**given)
    except (RuntimeError, ValueError) as error:
        if "Duplicate GPU" in str(error):
            raise LaunchError(
                f"rank {rank} has no GPU of its own: two ranks of this machine see only the same GPU",
                hint="give each rank its own GPU (srun --gpus-per-task=1), or make all GPUs visible to all ranks",
            ) from error
        raise LaunchError(f"rank {rank} could not join the {backend} process group: {error}") from error
