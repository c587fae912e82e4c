"""The environment variables of MPI launchers, in torch's words."""

from __future__ import annotations

import os

from dsjob.errors import LaunchError

# The environment variables of MPI launchers: rank, size, local rank, local size.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def count_ranks() -> int:
    """The number of ranks that an MPI launcher has started; 0 without one."""
    names = _find_names()
    size = os.environ[names[1]] if names is not None else ""
    return int(size) if size.isdecimal() else 0


def _find_names() -> tuple[str, str, str, str] | None:
    found = next((names for names in _MPI if names[0] in os.environ and names[1] in os.environ), None)
    # srun sets PMI's ranks, too (--mpi=pmi2), but only an MPI launcher sets the local ones.
    by_srun = found == _MPI[-1] and "SLURM_STEP_ID" in os.environ and found[2] not in os.environ
    return None if by_srun else found


def discover_mpi() -> None:
    """Sets RANK, WORLD_SIZE and LOCAL_RANK from the variables of an MPI launcher, if there are any.

    If all ranks are on this machine, sets MASTER_ADDR to it. Raises LaunchError if MASTER_ADDR is needed and not set.
    """
    names = _find_names()
    if names is None:
        return
    rank, size, local_rank, local_size = (os.environ.get(name) for name in names)
    local_rank, local_size = local_rank or rank, local_size or size
    if "MASTER_ADDR" not in os.environ and size != "1":
        if local_size != size:
            raise LaunchError(
                f"MPI has started {size} ranks, {local_size} of them here, but MASTER_ADDR is not set",
                hint="add -x MASTER_ADDR=<host of rank 0> to mpirun",
            )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local_rank))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(local_size))
