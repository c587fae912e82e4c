"""The rendezvous for programs that dsjob did not launch: DeepSpeed's `init_distributed`."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from dsjob.errors import LaunchError
from dsjob.ranks import loopback
from dsjob.ranks.mesh import end_gloo_at_exit, join_world
from dsjob.ranks.mpi import discover_mpi

_MINUTES = "DEEPSPEED_TIMEOUT"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins torch.distributed's process group, unless it exists already. Without settings, or for one rank, creates a
    group of one.

    Uses the first of these that is given: `init_method` with `rank` and `world_size`; the environment variables RANK,
    WORLD_SIZE and MASTER_ADDR; the variables of an MPI launcher (`auto_mpi_discovery`). timeout: of a collective; by
    default 30 minutes, or DEEPSPEED_TIMEOUT minutes. `verbose` and `config` have no effect. Raises LaunchError.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    end_gloo_at_exit()
    loopback.install()
    timeout = timeout or timedelta(seconds=read_timeout())
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if init_method is not None:
        try:
            dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(f"could not join the process group at {init_method}: {error}") from error
        return
    if auto_mpi_discovery and "RANK" not in os.environ:
        discover_mpi()
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    join_world(backend=dist_backend or "auto", timeout=timeout.total_seconds())
    if not dist.is_initialized():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def read_timeout() -> float:
    """The seconds that a collective may take: DEEPSPEED_TIMEOUT in minutes, or 30 minutes. Raises LaunchError."""
    given = os.environ.get(_MINUTES, "30")
    try:
        if 0 < 60 * float(given) < math.inf:
            return 60 * float(given)
    except ValueError:
        pass
    raise LaunchError(f"{_MINUTES}={given} is not a number of minutes", hint="set it to 30, for example, or unset it")
