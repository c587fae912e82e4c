"""Checks that all ranks read the same amount: datasets of equal length, and streams whose passes end at the same batch.

Lengths are compared at the start, ends of streams with each log record and before each save. Otherwise a rank that runs
out of data early would leave the others waiting.
"""

from __future__ import annotations

from dsjob.errors import DataError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World


class Passes:
    """Records where this rank's passes over data without a length end. strict: all ranks reach an end in the same
    step."""

    def __init__(self, name: str, *, strict: bool = True) -> None:
        self._name, self._strict = name, strict
        self._count, self._ends = 0, dict[int, int]()

    def end(self, batch: int) -> None:
        """Records that a pass ended after batch number `batch` of the run."""
        self._count += 1
        self._ends[self._count] = batch

    def require_same(self, world: World, *, loads: bool = True) -> None:
        """Raises DataError on all ranks if a pass ended at different batches on two of them. A collective."""
        # Ranks that read nothing take part too, because it is a collective.
        everyone = all_gather(world.everyone, (self._count, self._ends) if loads else None)
        found = {rank: each for rank, each in enumerate(everyone) if each is not None}
        # Passes that have ended on all ranks, and need not be compared again.
        least = min((count for count, _ in found.values()), default=0)
        for number in sorted({number for _, ends in found.values() for number in ends}):
            # None: this pass has not ended on that rank.
            places = {rank: ends.get(number) for rank, (_, ends) in found.items()}
            known = {rank: place for rank, place in places.items() if place is not None}
            if len(set(known.values())) > 1 or (self._strict and len(known) < len(places)):
                self._complain(number, places)
        self._ends = {number: place for number, place in self._ends.items() if number > least}

    def _complain(self, number: int, places: dict[int, int | None]) -> None:
        first = min((place, rank) for rank, place in places.items() if place is not None)
        other = next((place, rank) for rank, place in places.items() if place != first[0])
        end = "it has not ended yet" if other[0] is None else f"after {other[0]}"
        raise DataError(
            f"ranks read different amounts of {self._name}: pass {number} ended after {first[0]} batches on rank"
            f" {first[1]}, but on rank {other[1]} {end}",
            hint="each rank must see the same dataset (the same files, limits and filters), or an equal share of it",
        )


def require_same_length(samples: int | None, world: World, name: str) -> int | None:
    """The number of samples on the ranks that read data. Raises DataError on all ranks if they differ."""
    everyone = all_gather(world.everyone, (world.loads, samples))
    lengths = {rank: length for rank, (loads, length) in enumerate(everyone) if loads}
    first, *others = lengths.items()
    for rank, length in others:
        if length != first[1]:
            found = ["no length" if each is None else f"{each:,} samples" for each in (first[1], length)]
            raise DataError(
                f"{name} differs between ranks: {found[0]} on rank {first[0]}, {found[1]} on rank {rank}",
                hint="build the same dataset on every rank; dsjob divides it among them",
            )
    return first[1]
