"""Real ranks for tests: processes on gloo that run one function and give back what it returns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import multiprocessing


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Calls `function(world, *arguments)` on `world_size` new processes; their results by rank.

    `function` has to be importable: at the top level of a test module. A rank that raises fails the test.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (world_size, folder, function, arguments), nprocs=world_size)
        return [torch.load(f"{folder}/result-{rank}", weights_only=False) for rank in range(world_size)]


def _run(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(
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
