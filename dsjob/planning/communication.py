"""Bytes that leave a rank's memory: through the collectives of one optimizer step, and into a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsjob.planning.model import MASTER_SIZE, Layout, Model, OptimizerState, count

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast"]
# Shares of the whole tensor that a rank sends, times W / (W - 1) for W ranks: those of ring algorithms.
_ROUNDS: dict[Collective, int] = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1}


@dataclass(frozen=True, slots=True)
class Transfer:
    """`bytes` of whole tensors that pass through a collective in a step, and those that a rank sends of them."""

    collective: Collective
    what: str
    bytes: int
    sent: int


def predict_communication(model: Model, layout: Layout) -> tuple[Transfer, ...]:
    """The transfers of one optimizer step; the few numbers of the gradients' norm are left out.

    Stage 0 all-reduces the gradients at the boundary. Stages 1 to 3 gather parameters in the compute dtype (once a
    step; at stage 3 in every micro step, blocks in both passes) and reduce-scatter gradients (at the boundary; from
    stage 2 in every micro step). MiCS does so in its groups, and all-reduces shards between them; with hpZ the backward
    pass gathers in its groups.
    """
    size, ranks = layout.shards, layout.world_size
    if ranks == 1:
        return ()
    moved: list[tuple[Collective, str, int, int]] = []
    if layout.stage == 0:
        times = layout.grad_accum if layout.sums_in_masters else 1
        moved.append(("all-reduce", "gradients", count(model.trainable) * layout.reduce * times, ranks))
    else:
        units = {number: sum(w.padded(size) for w in unit) * size for number, unit in model.units(layout.stage).items()}
        rest, blocks = units.get(0, 0), sum(elements for number, elements in units.items() if number)
        gathered, again = rest + blocks, 0
        if layout.stage == 3:
            again = layout.grad_accum * (blocks if model.blocks_known else rest)
            gathered *= layout.grad_accum
        second = layout.second or size
        reduced = sum(w.padded(size) for w in model.trainable) * size
        times = 1 if layout.defers else layout.grad_accum
        if second == size:
            gathered, again = gathered + again, 0
        moved.append(("all-gather", "parameters", gathered * layout.compute, size))
        moved.append(("all-gather", "second copies", again * layout.compute, second))
        moved.append(("reduce-scatter", "gradients", reduced * layout.reduce * times, size))
        if size < ranks:
            moved.append(("all-reduce", "shards of gradients", reduced // size * layout.reduce * times, ranks // size))
    if model.buffers:
        moved.append(("broadcast", "model buffers", model.buffers, ranks))
    return tuple(
        Transfer(kind, what, whole, whole * _ROUNDS[kind] * (group - 1) // group)
        for kind, what, whole, group in moved
        if whole
    )


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """Bytes of one checkpoint over all ranks, of the largest rank's share, and of the weights it converts to."""

    whole: int
    rank: int
    fp32: int
    bf16: int


def predict_checkpoint(model: Model, layout: Layout, state: OptimizerState) -> CheckpointSize:
    """The size of a checkpoint: trained parameters as masters, frozen ones as the model holds them, optimizer state.

    Headers and manifests add some kilobytes.
    """
    cast = layout.replicated and layout.compute < MASTER_SIZE
    weights = 0
    for weight in model.weights:
        kept = MASTER_SIZE if weight.trainable else layout.compute
        weights += weight.elements * (kept if cast else weight.itemsize)
    trained = sum(w.elements * (MASTER_SIZE if cast else w.itemsize) for w in model.trainable)
    state_size = round(state.copies_saved(layout.world_size) * trained) + state.per_parameter * len(model.trainable)
    whole = weights + model.buffers + state_size
    share = whole / count(model.weights) * sum(w.padded(layout.world_size) for w in model.weights) if whole else 0
    return CheckpointSize(whole, round(share), MASTER_SIZE * count(model.weights), 2 * count(model.weights))
