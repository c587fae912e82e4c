"""DeepSpeed's topologies: the places of ranks on named axes. Only arithmetic.

Ranks are numbered along the last axis first.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from dsjob.errors import UsageError


class ProcessTopology:
    """Maps ranks to coordinates on named axes, and back.

    axes: names, outermost first. dims: the number of ranks along each. `mapping`: the rank of each coordinate, a
    named tuple `ProcessCoord`.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        if len(self.axes) != len(self.dims) or len(set(self.axes)) < len(self.axes) or min(self.dims, default=1) < 1:
            raise UsageError(
                f"a topology has axes {self.axes} and sizes {self.dims}",
                hint="each axis needs a name of its own and a size of 1 or more",
            )
        coordinates: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord: Callable[..., Any] = coordinates
        places = product(*(range(size) for size in self.dims))
        self.mapping: dict[Any, int] = {coordinates(*place): rank for rank, place in enumerate(places)}
        self._coordinates = list(self.mapping)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{a}={n}' for a, n in zip(self.axes, self.dims, strict=True))})"

    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """The names of the axes, outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The number of ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coordinates: int) -> int:
        """The rank at a place, which has a coordinate on every axis. Raises UsageError."""
        if coordinates.keys() != set(self.axes):
            raise UsageError(
                f"get_rank needs a coordinate on each axis of {self}, but got {', '.join(coordinates) or 'none'}",
                hint="filter_match() finds all ranks with some coordinates",
            )
        found = self.mapping.get(self.ProcessCoord(**coordinates))
        if found is None:
            raise UsageError(f"{self} has no rank at {coordinates}")
        return found

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank, a named tuple. Raises UsageError."""
        if not 0 <= rank < len(self._coordinates):
            raise UsageError(f"{self} has no rank {rank}")
        return self._coordinates[rank]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The coordinates of a rank as text, for file names: `model_01`. Leaves out `omit_axes`."""
        place = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ in their coordinate on `axis` alone; [] if there is no such axis."""
        if axis not in self.axes:
            return []
        others = [each for each in self.axes if each != axis]
        fixed = product(*(range(self.get_dim(each)) for each in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in fixed]

    def filter_match(self, **coordinates: int) -> list[int]:
        """All ranks with these coordinates, in order."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == wanted for axis, wanted in coordinates.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks whose coordinate on `axis` is `idx`, in order."""
        return self.filter_match(**{axis: idx})


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages x data-parallel ranks: the ranks of a stage are neighbours, since they exchange gradients."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages x data-parallel ranks x parts of each layer."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def order_ranks(topology: ProcessTopology, axes: Sequence[str] = ("pipe", "data", "model")) -> tuple[int, ...]:
    """The ranks of a topology in the order of `axes`, the last one varying fastest. Raises UsageError for other axes
    with more than one rank."""
    strange = [axis for axis in topology.axes if axis not in axes and topology.get_dim(axis) > 1]
    if strange:
        raise UsageError(
            f"{topology} has an axis {strange[0]}", hint=f"a pipeline divides its ranks along {', '.join(axes)}"
        )
    places = product(*(range(max(topology.get_dim(axis), 1)) for axis in axes))
    found = []
    for place in places:
        named = {axis: number for axis, number in zip(axes, place, strict=True) if axis in topology.axes}
        found.append(topology.get_rank(**{**dict.fromkeys(topology.axes, 0), **named}))
    return tuple(found)
