"""Calls that all ranks must make together: finds out that another rank does not come, before this one waits for ever.

Inside a collective it would be too late: the other rank's next collective would pair with this one, and exchange
unrelated data. So the ranks first meet at a key of their store.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import count

from dsjob.errors import UsageError
from dsjob.ranks import patience, watchdog
from dsjob.ranks.mesh import World
from dsjob.ranks.watchdog import ENDED, read_beat
from dsjob.terminal import write_now
from dsjob.torch_private import get_store

_made = count()


class Meetings:
    """The calls of one object, such as an engine, that all data-parallel ranks must make in the same order.

    Ranks must create such objects in the same order, too.
    """

    def __init__(self, world: World) -> None:
        self._world, self._number, self._calls = world, next(_made), Counter[str]()

    def meet(self, what: str, hint: str) -> None:
        """Waits until all data-parallel ranks have called this as often as this one. what: the call, for errors.

        Raises UsageError once it is certain that another rank does not come: its watchdog tells that the rank has
        ended, or waits in another collective; or the ranks' timeout is over.
        """
        self._calls[what] += 1
        if self._world.data_size == 1:
            return
        key = f"dsjob/meet/{self._world.model.rank}/{self._number}/{what}"
        _meet(self._world, f"{key}/{self._calls[what]}", what, hint)
        # All ranks have left the meeting before this one. Its key would stay in the store's memory.
        if self._world.data_rank == 0:
            get_store().delete_key(f"{key}/{self._calls[what] - 1}")


# Seconds between looks at the other ranks' beats, on few ranks. All waiting ranks ask one store.
_BETWEEN_LOOKS = 1.0


def _meet(world: World, key: str, what: str, hint: str) -> None:
    """Waits until all data-parallel ranks call this with the same `key`, which must be new."""
    store = get_store()
    store.append(key, f"{world.everyone.rank} ")  # type: ignore[attr-defined]
    # `ahead`: ranks in a later collective. They must stay there for a while: see `patience.TO_BE_SURE`.
    began, elsewhere_since, pause, noted = time.monotonic(), 0.0, 0.002, False
    ended, ahead, looked = list[int](), list[int](), began
    while len(here := set(store.get(key).decode().split())) < world.data_size:
        now = time.monotonic()
        if now - looked > _BETWEEN_LOOKS * (1 + world.data_size / 100):
            looked, (ended, ahead) = now, _find_elsewhere(here)
            elsewhere_since = (elsewhere_since or now) if ahead else 0.0
        if ended or (ahead and now - elsewhere_since > patience.TO_BE_SURE) or now - began > world.timeout:
            does = "ended" if ended else "went on to something else" if ahead else "did not within the ranks' timeout"
            others = _name(ended or ahead) or "another rank"
            raise UsageError(f"not all ranks call {what}: {others} {does}", hint=hint)
        if not noted and now - began > patience.TO_SAY:
            noted = True
            write_now(f"dsjob: rank {world.everyone.rank} waits for the other ranks in {what}: {hint}")
        time.sleep(pause)
        # Short at first, since ranks usually arrive together; then longer, to spare the store.
        pause = min(0.2 * (1 + world.data_size / 100), 1.5 * pause)


def _find_elsewhere(here: set[str]) -> tuple[list[int], list[int]]:
    """The ranks that have ended, and those that have entered a collective of all ranks which this one has not; without
    those `here`."""
    board = watchdog.position.board
    if board is None:
        return [], []
    # The collectives of all ranks that this rank has entered. A rank with more of them has left this call out.
    own = read_beat().joint
    beats = {rank: beat for rank, beat in board.read_beats().items() if str(rank) not in here}
    ended = [rank for rank, beat in beats.items() if beat.doing == ENDED]
    return ended, [rank for rank, beat in beats.items() if beat.joint > own]


def _name(ranks: list[int]) -> str:
    more = ", ..." if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}" if ranks else ""
