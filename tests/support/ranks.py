"""Real ranks for tests: processes on gloo that run one function and give back what it returns.

Each call has processes of its own, so that nothing leaks from one test into another. They are forks of one process that
has imported torch and dsjob and done nothing else: a call costs a fraction of a second instead of four.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import connection, get_context, parent_process
from typing import Any

import torch
from torch import multiprocessing

# None of these starts a thread of torch's, which a fork would lose. FSDP2 imports torch._dynamo at its first use.
PRELOADED = ["dsjob.entry", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "pytest"]


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Calls `function(world, *arguments)` on `world_size` new processes; their results by rank.

    `function` has to be importable: at the top level of a test module. A rank that raises fails the test. The ranks
    have this process's environment, but torch has read its own variables (OMP_NUM_THREADS, ...) at the first call.
    """
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, dict(os.environ), function, arguments)
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
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        DSJOB_STORE=f"{folder}/store",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    from dsjob.mesh import join_world, leave_world

    world = join_world(device="cpu", timeout=120)
    torch.save(function(world, *arguments), f"{folder}/result-{rank}")
    leave_world()
    os._exit(0)  # see dsjob.launch.end_rank


def _end_with_pytest() -> None:
    """Ends this rank once pytest is gone. The system would tell its parent's death, but that is another process."""
    pytest = parent_process()
    assert pytest is not None
    connection.wait([pytest.sentinel])
    os._exit(1)
