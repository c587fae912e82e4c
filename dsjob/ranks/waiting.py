"""Waits for ranks whose preparation may take any time, such as those of a machine that builds a token cache.

In a collective, the waiting ranks would run into its timeout. So they poll a key of their store instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dsjob.ranks import patience
from dsjob.ranks.mesh import World
from dsjob.torch_private import get_store

_made: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()


@contextmanager
def waiting_for_all(world: World, what: str) -> Iterator[None]:
    """Runs the block, and then waits until all ranks have left theirs. All ranks must call it in the same order.

    A rank that fails does not wait, and counts as one that has left, so that the next collective shows its error. One
    rank of each machine says every minute which ranks are missing. what: what the block prepares, for this message.
    """
    if world.everyone.size == 1:
        yield
        return
    group = dist.group.WORLD
    assert group is not None
    key = f"dsjob/wait/{next(_made.setdefault(group, count()))}"
    try:
        yield
    finally:
        get_store().append(key, f"{world.everyone.rank} ")  # type: ignore[attr-defined]
    _wait(world, key, what)


def _wait(world: World, key: str, what: str) -> None:
    ranks, rank = set(range(world.everyone.size)), world.everyone.rank
    began = said = time.monotonic()
    pause = 0.002
    while missing := sorted(ranks.difference(map(int, get_store().get(key).decode().split()))):
        now = time.monotonic()
        if world.local_rank == 0 and now - said >= patience.TO_SAY_AGAIN:
            said = now
            those = f"rank {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
            text = f"dsjob: rank {rank} has waited {now - began:.0f} s for {those}, still preparing {what}\n"
            os.write(2, text.encode())
        time.sleep(pause)
        # Short at first, since ranks usually arrive together; then longer, to spare the store.
        pause = min(0.2 * (1 + len(ranks) / 100), 1.5 * pause)
