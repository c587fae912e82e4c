"""Checks that all nodes share the storage for checkpoints.

Rank 0 writes a file there. If another node does not see it, the run ends before the first step.
"""

from __future__ import annotations

import os
import socket
import time
import uuid

from dsjob import storage
from dsjob.errors import LaunchError
from dsjob.ranks import patience
from dsjob.ranks.agreement import all_gather, on_rank_0
from dsjob.ranks.mesh import World

_ADVICE = "set checkpoint.dir to a folder on storage that all nodes mount, or to a URL such as s3://bucket/run"


def check_shared(folder: str, world: World) -> None:
    """Checks that every node sees the file that rank 0 writes to `folder`. Raises LaunchError on all ranks.

    Skipped for URLs of stores, which are shared anyway, and for a single node.
    """
    # All ranks are on this machine.
    if world.everyone.size == int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0):
        return
    if folder.startswith("memory:"):
        raise LaunchError(
            f"checkpoints would go to {folder}, the memory of one process, which nodes cannot share",
            hint=_ADVICE,
        )
    if not storage.is_local(folder):
        return
    folder = storage.local_path(folder)
    written = on_rank_0(world.everyone, lambda: _write(folder))
    try:
        # One rank per node looks; the others take part with None, because it is a collective.
        unseen = all_gather(world.everyone, _find_unseen(folder, written) if world.local_rank == 0 else None)
    finally:
        if world.everyone.rank == 0:
            storage.delete(_locate(folder, written))
    nodes = [node for node in unseen if node is not None]
    if nodes:
        raise LaunchError(
            f"the nodes do not share the checkpoint folder: {nodes[0]} does not see what rank 0 writes to"
            f" {os.path.dirname(_locate(folder, written))}",
            hint=_ADVICE,
        )


def _write(folder: str) -> str:
    """Creates a file in `folder`, or if it does not exist yet, in the closest parent. Returns its path relative to
    `folder`."""
    up = ""
    while not os.path.isdir(_locate(folder, up)) and _locate(folder, up) != os.sep:
        up = os.path.join(os.pardir, up)
    written = os.path.join(up, f".seen-by-all-{uuid.uuid4().hex}")
    storage.write_bytes(_locate(folder, written), b"")
    return written


def _locate(folder: str, inside: str) -> str:
    return os.path.normpath(os.path.join(os.path.abspath(folder), inside))


def _find_unseen(folder: str, written: str) -> str | None:
    """This node's name if it does not see the file; otherwise None."""
    end = time.monotonic() + patience.TO_BE_SEEN
    while not os.path.exists(_locate(folder, written)):
        if time.monotonic() > end:
            return f"{socket.gethostname()} (rank {os.environ.get('RANK', '?')})"
        time.sleep(0.1)
    return None
