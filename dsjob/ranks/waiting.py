"""Waits for ranks whose preparation may take any time, such as those of a machine that builds a token cache.

In a collective, the waiting ranks would run into its timeout. So they poll a key of their store instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dsjob.errors import LostRankError
from dsjob.ranks import patience
from dsjob.ranks.mesh import World
from dsjob.ranks.stalls import Beat
from dsjob.ranks.watchdog import position
from dsjob.terminal import write_now
from dsjob.torch_private import get_store

_made: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()


@contextmanager
def waiting_for_all(world: World, what: str) -> Iterator[None]:
    """Runs the block, and then waits until all ranks have left theirs. All ranks must call it in the same order.

    A rank that fails does not wait, and counts as one that has left, so that the next collective shows its error. One
    rank of each machine says every minute which ranks are missing and what they do, and raises LostRankError if one of
    them shows no sign of life for long. what: what the block prepares, for messages.
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
    ranks, rank, signs = set(range(world.everyone.size)), world.everyone.rank, _Signs(what)
    began = said = looked = time.monotonic()
    pause = 0.002
    while missing := sorted(ranks.difference(map(int, get_store().get(key).decode().split()))):
        now = time.monotonic()
        # Not more often: reading the beats of a thousand ranks costs the store much.
        if world.local_rank == 0 and now - looked >= patience.TO_MISS / 10:
            looked = now
            signs.look(missing)
        if world.local_rank == 0 and now - said >= patience.TO_SAY_AGAIN:
            said = now
            those = f"rank {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
            text = f"dsjob: rank {rank} has waited {now - began:.0f} s for {those}, still preparing {what}"
            write_now(f"{text}{signs.describe(missing[0])}")
        time.sleep(pause)
        # Short at first, since ranks usually arrive together; then longer, to spare the store.
        pause = min(0.2 * (1 + len(ranks) / 100), 1.5 * pause)


class _Signs:
    """The signs of life of other ranks: the beats that their watchdogs post."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._beats: dict[int, Beat] = {}
        self._seen: dict[
            int, tuple[float, float]
        ] = {}  # by rank: the time in its last beat, and when it was first seen

    def look(self, ranks: Sequence[int]) -> None:
        """Reads the beats. Raises LostRankError for one of `ranks` whose beats have stopped."""
        if position.board is None:
            return
        now, self._beats = time.monotonic(), position.board.read_beats()
        limit = max(patience.TO_MISS, 10 * position.board.period)
        for rank in ranks:
            # The clocks of machines differ, so only a change counts.
            posted = self._beats[rank].time if rank in self._beats else 0.0
            before, since = self._seen.get(rank, (None, now))
            if posted != before:
                self._seen[rank] = (posted, now)
            elif now - since > limit:
                raise LostRankError(
                    f"rank {rank} has shown no sign of life for {now - since:.0f} s while it prepared {self._what}",
                    hint="it may have been killed, or its machine is gone",
                )

    def describe(self, rank: int) -> str:
        """What a rank is doing, if it is known."""
        doing = self._beats[rank].doing if rank in self._beats else "starting"
        return "" if doing == "starting" else f" ({doing})"
