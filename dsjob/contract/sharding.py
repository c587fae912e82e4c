"""Which parameters are sharded, offloaded and gathered together. Both the planner, which predicts memory, and the
engine use these functions, so that a plan matches the run.

`stage3_param_persistence_threshold` is not used: a block is gathered in one collective together with its small
parameters. Replicating them would save no collective, and would add one to reduce their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsjob.contract.spec import JobSpec

DISK_PART = 16 << 20  # bytes of masters on a disk that are stepped at a time, with their optimizer state
DISK_BUFFERS = 4  # of such parts, if offload_optimizer does not say otherwise
LEAST_IN_SHARES = 1 << 30  # bytes of parameters: below, building a model twice costs more than the memory is worth
SMALL_BLOCK = 1 << 20  # elements: for smaller blocks, the overhead of a collective outweighs its transfer time


def choose_share(sizes: Sequence[int], ratio: float) -> set[int]:
    """Indices of the parameters to offload: largest first, as many as fit into the share `ratio` of all elements.

    `sizes`: number of elements of each parameter.
    """
    left, chosen = ratio * sum(sizes), set()
    for number, size in sorted(enumerate(sizes), key=lambda item: -item[1]):
        if size <= left:
            chosen.add(number)
            left -= size
    return chosen


def choose_kept(sizes: Sequence[int], most: int) -> set[int]:
    """Indices of the parameters that stay in memory if others go to a disk: in order, each that fits into what is left
    of `most` elements.

    `sizes`: number of elements of each parameter on a rank.
    """
    kept = set()
    for number, size in enumerate(sizes):
        if size <= most:
            kept.add(number)
            most -= size
    return kept


def stands_alone(elements: int, stage: int) -> bool:
    """Whether a repeated block of this size is an FSDP unit of its own, instead of part of the root unit.

    Below stage 3 all parameters are gathered at once anyway, so only a large block is worth its own collectives. At
    stage 3 units also bound memory: only the blocks in use are gathered.
    """
    return stage == 3 or elements >= SMALL_BLOCK


def choose_ahead(sizes: Sequence[int], bucket: int, live: int | None = None) -> list[int]:
    """For each block, how many of the following blocks to prefetch while it computes, at stage 3: at least one.

    `sizes`: elements of the blocks in the order of use. The prefetched blocks have at most `bucket` elements together,
    and at most `live` including the block that computes.
    """
    found = []
    for number, own in enumerate(sizes):
        room = bucket if live is None else min(bucket, live - own)
        # reached[k]: elements of the next k + 1 blocks.
        reached = [sum(sizes[number + 1 : end]) for end in range(number + 2, len(sizes) + 1)]
        fitting = sum(elements <= room for elements in reached)
        found.append(max(fitting, 1) if reached else 0)
    return found


def builds_in_shares(spec: JobSpec) -> bool:
    """Whether each of several ranks builds a share of the parameters, if the model is large (LEAST_IN_SHARES)."""
    zero = spec.zero_optimization
    return (
        zero.stage == 3 and zero.mics_shard_size <= 0 and spec.model_ranks == 1 and not spec.models and not spec.driven
    )
