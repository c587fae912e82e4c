"""Which parameters, and how many of them at a time: the choices of sharding and offloading that a plan predicts and the
engine makes, in one place so that both are the same.

`stage3_param_persistence_threshold` has no use here: a block is gathered in one collective whatever its small
parameters, so replicating them would save no message and add one.
"""

from __future__ import annotations

from collections.abc import Sequence

SMALL_BLOCK = 1 << 20  # elements: handing over less costs more in calls than in bytes


def choose_share(sizes: Sequence[int], ratio: float) -> set[int]:
    """Numbers of the parameters, taken largest first, that make up a share of all elements or as much as fits in it.

    `sizes`: elements of each parameter.
    """
    left, chosen = ratio * sum(sizes), set()
    for number, size in sorted(enumerate(sizes), key=lambda item: -item[1]):
        if size <= left:
            chosen.add(number)
            left -= size
    return chosen


def stands_alone(elements: int, stage: int) -> bool:
    """Whether a repeated block of so many elements is sharded as a unit, not with what is outside the blocks.

    Below stage 3 all parameters are gathered at once in any case, so that a unit is worth it for its size alone.
    """
    return stage == 3 or elements >= SMALL_BLOCK


def choose_ahead(sizes: Sequence[int], bucket: int, live: int | None = None) -> list[int]:
    """How many of the blocks that follow are gathered ahead while each one computes, at stage 3: at least one.

    `sizes`: elements of the blocks in the order of use. Those ahead have at most `bucket` elements, and with the one
    that computes at most `live`.
    """
    found = []
    for number, own in enumerate(sizes):
        room = bucket if live is None else min(bucket, live - own)
        reached = [sum(sizes[number + 1 : end]) for end in range(number + 2, len(sizes) + 1)]
        fitting = sum(elements <= room for elements in reached)
        found.append(max(fitting, 1) if reached else 0)
    return found
