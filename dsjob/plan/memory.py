"""Memory of one rank, item by item, at the three moments at which it is highest.

`forward`: the last forward pass of a step has ended (of a step that is not the first, so that there is optimizer
state). `backward`: its backward pass is about to reduce the gradients of the last unit. `step`: all gradients are
reduced, and the optimizer is about to step. Between the first two, gradients come as activations go.

What exists when is that of `parallel.replicated`, `parallel.sharded`, `precision.Masters` and FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dsjob.plan.model import MASTER_SIZE, Layout, Model, OptimizerState, Weight, count

Moment = Literal["forward", "backward", "step"]
Place = Literal["device", "host"]
MOMENTS: tuple[Moment, ...] = ("forward", "backward", "step")
STATES = ("parameters", "gradients", "fp32 masters", "optimizer state")
BUCKET = 25 << 20  # bytes of a bucket of DDP


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one kind on a rank, at each moment."""

    name: str
    forward: int
    backward: int
    step: int
    place: Place = "device"
    note: str = ""

    @property
    def bytes(self) -> int:
        """The largest of the moments."""
        return max(self.forward, self.backward, self.step)


def _always(name: str, size: int, *, place: Place = "device", note: str = "") -> Item:
    return Item(name, size, size, size, place, note)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank holds."""

    items: tuple[Item, ...]

    def total(self, moment: Moment, place: Place = "device") -> int:
        """Bytes of all items at a moment."""
        return sum(getattr(item, moment) for item in self.items if item.place == place)

    @property
    def peak(self) -> int:
        """Bytes on the device at the highest moment."""
        return max(self.total(moment) for moment in MOMENTS)

    @property
    def peak_moment(self) -> Moment:
        """The highest moment on the device."""
        return max(MOMENTS, key=self.total)

    @property
    def host(self) -> int:
        """Bytes on the host at the highest moment."""
        return max(self.total(moment, "host") for moment in MOMENTS)

    @property
    def states(self) -> int:
        """Bytes of model state on the device as the optimizer steps: parameters, gradients, masters, its own state."""
        return sum(item.step for item in self.items if item.name in STATES and item.place == "device")


def predict_memory(
    model: Model,
    layout: Layout,
    state: OptimizerState,
    *,
    activations: int | None = None,
    largest_activation: int = 0,
    rank: int = 0,
) -> Memory:
    """The memory of `rank`, of which rank 0 has the most.

    `activations`: bytes that a forward pass over a micro batch leaves for the backward pass; left out where None.
    `largest_activation`: bytes of one of them; the backward pass holds its gradient while most are still there.
    """
    if layout.offload != "none":
        items = _offloaded(model, layout, state, rank)
    elif layout.replicated:
        items = _replicated(model, layout, state)
    else:
        items = _sharded(model, layout, state, rank)
    if model.buffers:
        items.append(_always("model buffers", model.buffers))
    if activations is not None:
        items.append(Item("activations", activations, 0, 0, note=f"micro batch of {layout.micro_batch}"))
        items.append(Item("activation gradient", largest_activation, 0, 0, note="of the largest activation"))
    return Memory(tuple(item for item in items if item.bytes))


def _replicated(model: Model, layout: Layout, state: OptimizerState) -> list[Item]:
    """Stage 0 or one rank: below fp32 the model is a copy of fp32 masters; DDP's buckets hold the gradients."""
    cast, ddp = layout.compute < MASTER_SIZE, layout.world_size > 1
    held = sum(w.elements * (layout.compute if cast else w.itemsize) for w in model.weights)
    own = sum(w.elements * (layout.compute if cast else w.itemsize) for w in model.trainable)
    masters = MASTER_SIZE * count(model.trainable) if cast else 0
    accumulated = own if layout.grad_accum > 1 else 0  # under DDP beside the buckets: without a reduction no views
    before = accumulated + (own if ddp else 0)
    kept = own if ddp or not cast else 0  # a lone model's gradients are dropped as the masters' are made
    note = "DDP keeps its buckets" + (", and the masters have fp32 ones" if cast else "") if ddp else ""
    return [
        _always("parameters", held, note="cast in place" if cast else ""),
        Item("gradients", before, own, kept + masters, note=note),
        _always("fp32 masters", masters),
        _state_item(model.trainable, [w.elements for w in model.trainable], state, cast, layout.world_size),
        *(_bucket_items(model, layout) if ddp and layout.reduce != layout.compute else []),
    ]


def _bucket_items(model: Model, layout: Layout) -> list[Item]:
    """Buckets that travel in a dtype of their own: two at a time, and none is smaller than its largest parameter."""
    largest = max((w.elements for w in model.trainable), default=0) * layout.reduce
    sent = min(2 * max(largest, BUCKET), count(model.trainable) * layout.reduce)
    return [Item("reduce buffers", 0, sent, 0, note="two DDP buckets in communication_data_type")]


def _sharded(model: Model, layout: Layout, state: OptimizerState, rank: int) -> list[Item]:
    """FSDP2: the parameters are shards of the fp32 masters; compute copies are gathered for the pass."""
    size = layout.world_size
    held = sum(w.padded(size) * w.itemsize for w in model.weights)
    reduced = sum(w.padded(size) * w.itemsize for w in model.trainable)
    if layout.grad_accum == 1:
        waiting, note = 0, ""
    elif layout.stage == 1:
        waiting, note = count(model.trainable) * layout.reduce, "whole while accumulating"
    else:
        waiting, note = reduced, ""
    return [
        _always("parameters", held, note="shards, which are the masters"),
        Item("gradients", waiting, reduced, reduced, note=note),
        _state_item(model.trainable, [w.shard(size, rank) for w in model.trainable], state, False),
        *_pass_items(model, layout, whole=False),
    ]


def _pass_items(model: Model, layout: Layout, *, whole: bool) -> list[Item]:
    """What FSDP2 holds during a pass: gathered parameters (unless `whole` ones stay), and buffers of collectives.

    Collectives overlap with computing, so that buffers of two blocks may be there at once. A model given as a number
    of parameters has no blocks to tell their sizes.
    """
    size, compute = layout.world_size, layout.compute
    units = {number: sum(w.padded(size) for w in unit) * size for number, unit in model.units().items()}
    if not model.blocks_known:
        gathered = sum(units.values()) * compute if layout.stage < 3 and not whole else 0
        return [Item("gathered parameters", gathered, gathered, 0, note="until the last backward pass of the step")]
    rest, blocks = units.pop(0, 0), sorted(units.values(), reverse=True)
    two, largest = sum(blocks[:2]), max([*blocks[:1], 0])
    items = []
    if not whole:
        kept, note = (rest + sum(blocks), "until the last backward pass of the step")
        if layout.stage == 3:
            kept, note = rest + two, "two blocks, and what is outside the blocks"
        ahead = 2 * (largest or rest) * compute
        items = [
            Item("gathered parameters", kept * compute, (rest if layout.stage == 3 else kept) * compute, 0, note=note),
            Item("all-gather buffers", ahead, 0, 0, note="two blocks" if blocks else "the whole model"),
        ]
    sent = layout.compute + 2 * layout.reduce
    note = "gradients of one unit, and two on their way"
    return [*items, Item("reduce-scatter buffers", largest * sent, (rest or largest) * sent, 0, note=note)]


def _state_item(
    weights: Iterable[Weight], elements: list[int], state: OptimizerState, cast: bool, replicas: int = 1
) -> Item:
    sizes = (MASTER_SIZE if cast else weight.itemsize for weight in weights)
    kept = round(state.copies_on(replicas) * sum(n * size for n, size in zip(elements, sizes, strict=True)))
    return _always("optimizer state", kept + state.per_parameter * len(elements))


def _offloaded(model: Model, layout: Layout, state: OptimizerState, rank: int) -> list[Item]:
    """What offloading to host memory would leave where, as DeepSpeed does it: dsjob has not built it yet.

    The device keeps compute copies (whole below stage 3); masters, fp32 gradients and optimizer state are on the host
    in shards. Source: DeepSpeed's docs, "Memory Requirements" (docs/code-docs/source/memory.rst).
    """
    size = layout.world_size
    shards = [w.shard(size, rank) for w in model.trainable]
    owned = sum(w.shard(size, rank) for w in model.weights) if layout.stage == 3 else count(model.weights)
    fp32 = MASTER_SIZE * sum(shards)
    waits = count(model.trainable) * layout.compute if layout.stage == 1 and layout.grad_accum > 1 else 0
    place: Place = "host" if layout.offload == "param" else "device"
    return [
        _always("parameters", owned * layout.compute, place=place, note="in the compute dtype"),
        Item("gradients", waits, waits, 0, note="whole while accumulating"),
        _always("fp32 gradients", fp32, place="host"),
        _always("fp32 masters", fp32, place="host"),
        _always("optimizer state", round(state.copies * fp32) + state.per_parameter * len(shards), place="host"),
        *_pass_items(model, layout, whole=layout.stage < 3),
    ]
