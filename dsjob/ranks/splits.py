"""How parameters are divided among the ranks along the `tensor` axis: which indices of one dimension a rank holds.

A rank's part is a plain tensor, as if the model were smaller. So DDP, FSDP2 and optimizers need to know nothing of it;
only what sees whole parameters does: checkpoints, exports, and optimizers that measure norms or need whole matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.ranks.mesh import Ranks

_SPLIT = "_dsjob_split"
Sections = int | tuple[int, ...]


def cut(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first and last index (exclusive) of a rank's share of `length` indices. As in torch.chunk and DTensors, the
    last ranks have less if it does not divide evenly."""
    share = -(-length // ranks)
    return min(rank * share, length), min((rank + 1) * share, length)


def list_sections(length: int, sections: Sections) -> tuple[int, ...]:
    """The lengths of the sections of a dimension (see `Split`)."""
    return (length // sections,) * sections if isinstance(sections, int) else sections


@dataclass(frozen=True, slots=True)
class Split:
    """One dimension of a parameter, of `length` indices on all ranks together, divided among `ranks`.

    sections: parts of that dimension, each of which is divided by itself: the number of equal ones, or their lengths. A
    layer that computes queries, keys and values at once has three, so that each rank gets some heads of each.
    """

    dim: int
    length: int
    ranks: Ranks
    sections: Sections = 1

    def ranges(self, rank: int | None = None) -> list[tuple[int, int]]:
        """The ranges of indices that a rank holds (by default this one), one after the other in its part."""
        found, begin = [], 0
        for length in list_sections(self.length, self.sections):
            start, stop = cut(length, self.ranks.size, self.ranks.rank if rank is None else rank)
            found.append((begin + start, begin + stop))
            begin += length
        return found

    def shape(self, own: Sequence[int]) -> torch.Size:
        """The shape of the whole parameter. own: the shape of this rank's part."""
        return torch.Size([self.length if dim == self.dim else size for dim, size in enumerate(own)])

    def take(self, value: Tensor) -> Tensor:
        """This rank's part of a whole parameter: a copy."""
        parts = [value.narrow(self.dim, start, stop - start) for start, stop in self.ranges()]
        return torch.cat(parts, self.dim).contiguous() if len(parts) > 1 else parts[0].clone()

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[list[int], list[int], list[int]]]:
        """Where a box of this rank's part lies in the whole parameter: for each piece of it, its first index there,
        its first index in the box, and its size. Pieces without elements are left out."""
        found, begin = [], 0  # `begin`: of a range, in this rank's part
        first, count = offsets[self.dim], sizes[self.dim]
        for start, stop in self.ranges():
            low, high = max(first, begin), min(first + count, begin + stop - start)
            if low < high and all(sizes):
                there, inside, extent = list(offsets), [0] * len(sizes), list(sizes)
                there[self.dim], inside[self.dim], extent[self.dim] = start + low - begin, low - first, high - low
                found.append((there, inside, extent))
            begin += stop - start
        return found

    def gather(self, own: Tensor) -> Tensor:
        """The whole parameter, from the parts of all ranks along the axis. A collective of these."""
        if self.ranks.size == 1:
            return own
        device = own.device if communicates_on(self.ranks) == own.device.type else torch.device("cuda")
        length = [sum(stop - start for start, stop in self.ranges(rank)) for rank in range(self.ranks.size)]
        shape = list(own.shape)
        # Collectives need tensors of one size.
        shape[self.dim] = max(length)
        sent = own.new_zeros(shape, device=device)
        sent.narrow(self.dim, 0, own.shape[self.dim]).copy_(own)
        received = [torch.empty_like(sent) for _ in range(self.ranks.size)]
        dist.all_gather(received, sent, group=self.ranks.group)
        whole = own.new_empty(self.shape(own.shape))
        for rank, part in enumerate(received):
            begin = 0
            for start, stop in self.ranges(rank):
                whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, begin, stop - start))
                begin += stop - start
        return whole


def communicates_on(ranks: Ranks) -> str:
    """The type of device on which ranks exchange tensors."""
    return "cuda" if dist.get_backend(ranks.group) == "nccl" else "cpu"


def mark_split(parameter: Tensor, split: Split) -> None:
    """Notes on a parameter, or on its master, which part of the whole one it is."""
    setattr(parameter, _SPLIT, split)


def find_split(parameter: Tensor) -> Split | None:
    """How a parameter is divided along the `tensor` axis; None if it is not."""
    return cast("Split | None", getattr(parameter, _SPLIT, None))
