"""Finds out that ranks have gathered different units at stage 3: each then computed with parts of both.

Ranks compare a digest of their gathers once a step, in a collective that they make anyway. The host of a GPU does not
wait for the result, but reads it in a later step, and before a save. On a CPU, units exchange messages with different
tags, so such ranks wait for each other instead of mixing values.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from dsjob.errors import UsageError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World

DIGEST = 8  # bytes


class _Comparison(NamedTuple):
    """The gathers of one step. largest: uint8 [DIGEST] on the host, of all ranks' digests, once `arrived`."""

    gathers: array[int]
    largest: Tensor
    arrived: torch.cuda.Event | None

    def is_there(self) -> bool:
        """Whether the host can read `largest` without waiting."""
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]


class GatherCheck:
    """The gathers of a step, and the comparisons of those of earlier steps."""

    def __init__(self, world: World, units: list[str]) -> None:
        """units: their names, by number."""
        self._world, self._names = world, units
        self._gathers = array("H")
        self._digests: dict[int, Tensor] = {}  # on the device, by checksum: nearly always the same
        self._comparisons = deque[_Comparison]()

    def note(self, number: int) -> None:
        """Notes a gather."""
        self._gathers.append(number)

    def digest(self) -> Tensor:
        """uint8 [DIGEST] of the gathers since the last call. The largest values over ranks go to `compare`."""
        checksum = zlib.crc32(self._gathers)
        if checksum not in self._digests:
            if len(self._digests) > 64:
                self._digests.clear()
            own = torch.tensor(list(checksum.to_bytes(4, "little")), dtype=torch.uint8)
            both = torch.cat([own, 255 - own])
            pinned = both.pin_memory() if self._world.device.type == "cuda" else both
            self._digests[checksum] = pinned.to(self._world.device, non_blocking=True)
        return self._digests[checksum]

    def compare(self, largest: Tensor) -> None:
        """Begins to compare the gathers of this step over ranks. largest: uint8 [DIGEST], of all ranks' digests.

        Raises UsageError if the gathers of a step are known to differ.
        """
        gathers, self._gathers = self._gathers, array("H")
        if largest.device.type == "cpu":
            self._comparisons.append(_Comparison(gathers, largest, None))
        else:
            copy = torch.empty(DIGEST, dtype=torch.uint8, pin_memory=True).copy_(largest, non_blocking=True)
            event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(largest.device))
            self._comparisons.append(_Comparison(gathers, copy, event))
        while self._comparisons and self._comparisons[0].is_there():
            self._read()

    def check(self) -> None:
        """Waits for all comparisons. Raises UsageError with the first difference."""
        if self._comparisons and (last := self._comparisons[-1].arrived) is not None:
            last.synchronize()
        while self._comparisons:
            self._read()

    def _read(self) -> None:
        gathers, largest, _ = self._comparisons.popleft()
        if torch.equal(largest[:4], 255 - largest[4:]):
            return
        first, *others = all_gather(self._world.data, [self._names[number] for number in gathers])
        rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
        raise describe_difference(first, other, rank)


def describe_difference(first: list[str], other: list[str], rank: int) -> UsageError:
    """The error for gathers of rank 0 and of another rank that differ."""
    place, (left, right) = next((i, pair) for i, pair in enumerate(zip_longest(first, other), 1) if pair[0] != pair[1])
    both = [f"rank {r} used {name}" if name else f"rank {r} used no more" for r, name in ((0, left), (rank, right))]
    after = f" after {first[place - 2]}" if place > 1 else ""
    return UsageError(
        f"ranks used different parts of the model at ZeRO stage 3, which gathers each part for all of them:"
        f" {both[0]}, {both[1]}{after}",
        hint="make the module that contains both parts a leaf (zero_optimization.leaf_module), so that they are"
        " gathered together, or use stage 2",
    )
