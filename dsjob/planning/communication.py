"""Predicts the traffic of one optimizer step's collectives, and the size of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsjob.planning.model import MASTER_SIZE, Layout, Model, OptimizerState, count, keep_masters

Axis = Literal["pipe", "data", "context", "tensor"]
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send"]
# With a ring algorithm over W ranks, each rank sends this number times (W - 1) / W of the whole tensor.
_ROUNDS: dict[Collective, int] = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "broadcast": 1,
    "all-to-all": 1,
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """One kind of collective in a step, along an axis of the mesh. `bytes`: size of the whole tensors; `sent`: bytes
    that each rank sends; of stages of a pipeline, the one that sends most."""

    collective: Collective
    what: str
    bytes: int
    sent: int
    axis: Axis = "data"


def make_transfer(axis: Axis, collective: Collective, what: str, whole: int, ranks: int) -> Transfer:
    """The transfer of `whole` bytes among so many ranks, which communicate in a ring."""
    return Transfer(collective, what, whole, whole * _ROUNDS[collective] * (ranks - 1) // ranks, axis)


def predict_communication(model: Model, layout: Layout) -> tuple[Transfer, ...]:
    """The transfers of one optimizer step among data-parallel ranks. Leaves out the few scalars of the gradient norm.

    Stage 0 all-reduces the gradients at the accumulation boundary. Stages 1 to 3 all-gather parameters in the compute
    dtype: once per step, or at stage 3 in every micro step, where blocks are gathered in both passes. They
    reduce-scatter gradients: at the boundary at stage 1, in every micro step from stage 2. MiCS does this within its
    groups and all-reduces gradient shards between them. With hpZ the backward pass gathers within the hpZ groups.
    """
    size, ranks = layout.shards, layout.world_size
    if ranks == 1:
        return ()
    moved: list[tuple[Collective, str, int, int]] = []
    if layout.stage == 0:
        times = layout.grad_accum if layout.sums_in_masters and layout.stages == 1 else 1
        moved.append(("all-reduce", "gradients", count(model.trainable) * layout.reduce * times, ranks))
    else:
        units = {number: sum(w.padded(size) for w in unit) * size for number, unit in model.units(layout.stage).items()}
        rest, blocks = units.get(0, 0), sum(elements for number, elements in units.items() if number)
        gathered, again = rest + blocks, 0  # `again`: elements that the backward pass of stage 3 gathers again
        if layout.stage == 3:
            again = layout.grad_accum * blocks
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
    return tuple(make_transfer("data", kind, what, whole, group) for kind, what, whole, group in moved if whole)


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """Sizes in bytes: the whole checkpoint, the largest rank's share, and the weights exported as fp32 and as bf16."""

    whole: int
    rank: int
    fp32: int
    bf16: int


def predict_checkpoint(model: Model, layout: Layout, state: OptimizerState) -> CheckpointSize:
    """The size of a checkpoint: master weights of trained parameters, frozen parameters, and optimizer state.

    Frozen parameters are saved in the dtype in which a rank holds them. Of replicated tensors, rank 0 writes all.
    Headers and manifests add a few kilobytes.
    """
    model, state = keep_masters(model, layout, state)
    cast = layout.replicated and layout.compute < layout.master
    weights = 0
    for weight in model.weights:
        kept = layout.master if weight.trainable else layout.compute
        weights += weight.elements * (kept if cast else weight.itemsize)
    trained = sum(w.elements * (layout.master if cast else w.itemsize) for w in model.trainable)
    state_size = round(state.copies_saved(layout.world_size) * trained) + state.per_parameter * len(model.trainable)
    whole, elements = weights + model.buffers + state_size, count(model.weights)
    if layout.replicated:
        others = state.copies_saved(layout.world_size) - state.copies_on(layout.world_size)  # ranks' own state
        rank = whole - round(others * trained)
    else:
        rank = round(whole / elements * sum(w.padded(layout.shards) for w in model.weights)) if whole else 0
    return CheckpointSize(whole, rank, MASTER_SIZE * elements, 2 * elements)
