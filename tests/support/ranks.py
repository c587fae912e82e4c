"""Real ranks for tests: processes on gloo that run one function and give back what it returns.

Each call has processes of its own, so that nothing leaks from one test into another. They are forks (`forks`): a call
costs a fraction of a second instead of four. They share a hash seed, which ranks that the launcher starts do not.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import simulated_cuda
import torch
from forks import begin_anew, end_with_pytest, get_forks
from torch import multiprocessing


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, library: Path | None = None) -> list[Any]:
    """Calls `function(world, *arguments)` on `world_size` new processes; their results by rank.

    `library`: a simulated CUDA device, as `simulated_cuda.build` gives it, for each rank to train on.

    `function` has to be importable: at the top level of a test module. A rank that raises fails the test. The ranks
    have this process's environment, but torch has read its own variables (OMP_NUM_THREADS, ...) at the first call.
    """
    get_forks()
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, dict(os.environ), library, function, arguments)
        ranks = multiprocessing.start_processes(_run, given, world_size, join=False, start_method="forkserver")
        try:
            while not ranks.join():
                pass
        finally:  # pytest's own time-out, or Ctrl-C
            for process in ranks.processes:
                process.kill()
        return [torch.load(f"{folder}/result-{rank}", weights_only=False) for rank in range(world_size)]


def _run(
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    library: Path | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=end_with_pytest, daemon=True).start()
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    begin_anew({**environment, **place, "DSJOB_STORE": f"{folder}/store", "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    from dsjob.ranks.mesh import join_world, leave_world

    if library is not None:
        simulated_cuda.install(library, world_size)
    world = join_world(device="cpu" if library is None else "cuda", timeout=120)
    torch.save(function(world, *arguments), f"{folder}/result-{rank}")
    leave_world()
    os._exit(0)  # see dsjob.launch.rank.end_rank
