"""Predicts the memory of one rank, item by item, at the three moments at which it can peak.

`forward`: the last forward pass of a step has ended. It is not the first step, so optimizer state exists.
`backward`: the backward pass is about to reduce the gradients of the last unit. `step`: all gradients are reduced, and
the optimizer is about to step. Between the first two moments, gradients replace activations one by one.

The lifetimes of tensors follow `parallel.replicated`, `parallel.sharded`, `parallel.masters` and FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dsjob.contract.sharding import DISK_BUFFERS, DISK_PART, choose_ahead, choose_kept, choose_share
from dsjob.planning.model import MASTER_SIZE, Layout, Model, OptimizerState, Weight, count, keep_masters

Moment = Literal["forward", "backward", "step"]
Place = Literal["device", "host", "disk"]
MOMENTS: tuple[Moment, ...] = ("forward", "backward", "step")
STATES = ("parameters", "gradients", "fp32 masters", "masters", "optimizer state")
BUCKET = 25 << 20  # bytes of a DDP bucket


@dataclass(frozen=True, slots=True)
class Item:
    """One kind of memory on a rank: its bytes at each moment."""

    name: str
    forward: int
    backward: int
    step: int
    place: Place = "device"
    note: str = ""

    @property
    def bytes(self) -> int:
        """Bytes at the moment with the most."""
        return max(self.forward, self.backward, self.step)


def _always(name: str, size: int, *, place: Place = "device", note: str = "") -> Item:
    return Item(name, size, size, size, place, note)


@dataclass(frozen=True, slots=True)
class Memory:
    """All memory of a rank."""

    items: tuple[Item, ...]

    def total(self, moment: Moment, place: Place = "device") -> int:
        """Bytes of all items at a moment."""
        return sum(getattr(item, moment) for item in self.items if item.place == place)

    @property
    def peak(self) -> int:
        """Peak bytes on the device."""
        return max(self.total(moment) for moment in MOMENTS)

    @property
    def peak_moment(self) -> Moment:
        """The moment at which the device memory peaks."""
        return max(MOMENTS, key=self.total)

    @property
    def host(self) -> int:
        """Peak bytes on the host."""
        return max(self.total(moment, "host") for moment in MOMENTS)

    @property
    def disk(self) -> int:
        """Bytes on a disk."""
        return self.total("step", "disk")

    @property
    def states(self) -> int:
        """Bytes of model states on the device at `step`: parameters, gradients, masters and optimizer state."""
        return sum(item.step for item in self.items if item.name in STATES and item.place == "device")


def predict_memory(
    model: Model,
    layout: Layout,
    state: OptimizerState,
    *,
    activations: int | None = None,
    largest_activation: int = 0,
    moved_activations: int = 0,
    rank: int = 0,
) -> Memory:
    """The memory of `rank`. Of the ranks that shard the model, the first holds the most.

    `activations`: bytes that the forward pass over a micro batch keeps for the backward pass; with recomputation, the
    peak while a block is recomputed. None leaves activations out. `moved_activations`: bytes of activations that are
    kept on the host. `largest_activation`: bytes of the largest activation. The backward pass holds its gradient while
    most activations are still in memory.
    """
    model, state = keep_masters(model, layout, state)
    items = _replicated(model, layout, state) if layout.replicated else _sharded(model, layout, state, rank)
    if model.buffers:
        items.append(_always("model buffers", model.buffers))
    if layout.holds and layout.grad_accum > 1:
        size = 1 if layout.replicated else layout.shards
        sums = layout.accumulate * sum(w.shard(size, rank % size) for w in model.trainable)
        place: Place = "device" if layout.offload == "none" else "host"
        items.append(Item("gradient sums", sums, sums, 0, place, note="in data_types.grad_accum_dtype"))
    if activations is not None:
        of = f"{layout.held} micro batches" if layout.held > 1 else "micro batch"
        items.append(Item("activations", activations, 0, 0, note=f"{of} of {layout.micro_batch}"))
        items.append(Item("activation gradient", largest_activation, 0, 0, note="of the largest activation"))
        moved = moved_activations
        items.append(Item("block inputs", moved, 0, 0, place="host", note="activation_checkpointing.cpu_checkpointing"))
    return Memory(tuple(item for item in items if item.bytes))


def _replicated(model: Model, layout: Layout, state: OptimizerState) -> list[Item]:
    """Stage 0, or a single rank. Below fp32 the model is a copy of fp32 masters. DDP's buckets hold the gradients, but
    not in a pipeline, which has no DDP."""
    cast, ddp = layout.compute < layout.master, layout.world_size > 1 and layout.stages == 1
    near, far = _split(model, layout)
    if far:
        return [
            _always("parameters", _held(model, layout), note="cast in place" if cast else ""),
            *_streamed_items(model, layout, near),
            *_master_items(near, [w.elements for w in near], state, cast),
            *_host_items(model, far, [w.elements for w in far], state, layout, layout.compute),
        ]
    own = sum(w.elements * (layout.compute if cast else w.itemsize) for w in model.trainable)
    masters = layout.master * count(model.trainable) if cast else 0
    several = layout.sums_by_itself
    sums = masters if several and layout.sums_in_masters else 0
    # DDP makes gradients views of its buckets only when it reduces; accumulated gradients are extra memory until then.
    accumulated = own if several and not sums else 0
    before = accumulated + sums + (own if ddp else 0)
    kept = own if ddp or not cast else 0  # without DDP, gradients are freed as they are copied to the masters
    note = "DDP keeps its buckets" + (", and the masters have fp32 ones" if cast else "") if ddp else ""
    return [
        _always("parameters", _held(model, layout), note="cast in place" if cast else ""),
        Item("gradients", before, own + sums, kept + masters, note=note),
        *_master_items(model.trainable, [w.elements for w in model.trainable], state, cast, layout.world_size),
        *(_bucket_items(model, layout) if layout.copies_to_reduce else []),
    ]


def _held(model: Model, layout: Layout) -> int:
    cast = layout.compute < layout.master
    return sum(w.elements * (layout.compute if cast else w.itemsize) for w in model.weights)


def _split(model: Model, layout: Layout) -> tuple[list[Weight], list[Weight]]:
    """The trained parameters with masters on the device, and those with masters on the host."""
    trainable = model.trainable
    if layout.offload == "none":
        return list(trainable), []
    ratio = layout.ratio if layout.offload == "optimizer" else 1.0
    chosen = choose_share([w.elements for w in trainable], ratio)
    return (
        [w for number, w in enumerate(trainable) if number not in chosen],
        [w for number, w in enumerate(trainable) if number in chosen],
    )


def _streamed_items(model: Model, layout: Layout, near: list[Weight]) -> list[Item]:
    """Gradients of a rank that holds the whole model: each moves to its master as soon as it is computed."""
    cast = layout.compute < layout.master
    own = sum(w.elements * (layout.compute if cast else w.itemsize) for w in model.trainable)
    kept = count(near) * layout.master if cast else sum(w.elements * w.itemsize for w in near)
    waiting = (kept if layout.sums_in_masters else own) if layout.sums_by_itself else 0
    largest = max((w.elements for w in model.trainable), default=0) * layout.compute
    return [
        Item("gradients", waiting, kept, kept, note="whole while accumulating" if waiting > kept else ""),
        Item("gradients on their way", 0, largest, 0, note="to the host"),
    ]


def _master_items(
    weights: Iterable[Weight], elements: list[int], state: OptimizerState, cast: bool, replicas: int = 1
) -> list[Item]:
    """Optimizer state on the device, and separate fp32 masters if the model is `cast` to a lower precision."""
    masters = MASTER_SIZE * sum(elements) if cast else 0
    return [_always("fp32 masters", masters), _state_item(weights, elements, state, cast, replicas)]


def _host_items(
    model: Model, weights: list[Weight], elements: list[int], state: OptimizerState, layout: Layout, taken: int
) -> list[Item]:
    """Masters, their gradients and the optimizer state on the host. All of them stay allocated between steps. Masters
    and state may be on a disk instead. taken: bytes per element of the gradients that a GPU sends."""
    size = layout.master * sum(elements)
    kept = round(state.copies * size) + state.per_parameter * len(weights)
    masters = size if layout.disk_buffers else _round_up(model, layout, [layout.master * each for each in elements])
    # In page-locked memory, all gradients of a step may be on their way at once, and the allocator keeps their memory.
    sent = _round_up(model, layout, [taken * each for each in elements]) if layout.pinned else 0
    return [
        _always(
            "fp32 masters" if layout.master == MASTER_SIZE else "masters",
            masters,
            place="disk" if layout.disk_buffers else "host",
        ),
        _always("gradients", size, place="host", note="kept from step to step"),
        _always("gradients in transit", sent, place="host", note="in page-locked memory"),
        _always("optimizer state", kept, place="disk" if layout.disk_buffers else "host"),
        _disk_item(elements, 1 + state.copies, layout.disk_buffers),
    ]


def _round_up(model: Model, layout: Layout, sizes: Iterable[int]) -> int:
    """Bytes on the host of tensors of these sizes. PyTorch rounds each up to a power of two in page-locked memory."""
    if not layout.pinned or model.assumed:  # a bare parameter count has no tensors of known sizes
        return sum(sizes)
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _disk_item(elements: list[int], copies: float, buffers: int) -> Item:
    """The buffers in host memory of what is on a disk: `copies` of the masters. The first step allocates them."""
    part = max(DISK_PART, MASTER_SIZE * max(elements, default=0)) if buffers else 0
    held = min(buffers * part, MASTER_SIZE * sum(elements))
    return _always("disk buffers", round(copies * held), place="host", note="a part in each")


def _bucket_items(model: Model, layout: Layout) -> list[Item]:
    """Copies of buckets of gradients: in a pipeline, and where DDP reduces gradients in another dtype than they are
    computed in.

    Two buckets are in flight at a time. A bucket is at least as large as its largest parameter.
    """
    largest = max((w.elements for w in model.trainable), default=0) * layout.reduce
    sent = min(2 * max(largest, BUCKET), count(model.trainable) * layout.reduce)
    return [Item("reduce buffers", 0, sent, 0, note="two buckets in communication_data_type")]


def _sharded(model: Model, layout: Layout, state: OptimizerState, rank: int) -> list[Item]:
    """FSDP2: parameters are shards of the fp32 masters. Copies in the compute dtype are gathered for each pass."""
    if layout.offload == "optimizer":
        return _sharded_beside(model, layout, state, rank)
    size = layout.shards
    reduced = sum(w.padded(size) * w.itemsize for w in model.trainable)
    waiting, note = (reduced, "") if layout.sums_by_itself and not layout.defers else (0, "")
    if layout.sums_by_itself and layout.defers:
        waiting, note = count(model.trainable) * layout.reduce, "whole while accumulating"
    shards = [w.shard(size, rank % size) for w in model.trainable]
    kept = _state_item(model.trainable, shards, state, False)
    if layout.offload != "param":
        held = sum(w.padded(size) * w.itemsize for w in model.weights)
        return [
            _always("parameters", held, note="shards, which are the masters"),
            Item("gradients", waiting, reduced, reduced, note=note),
            kept,
            *_pass_items(model, layout),
        ]
    copies = state.copies * bool(layout.disk_buffers) + bool(layout.block_buffers)
    sent = _round_up(model, layout, [w.padded(size) * w.itemsize for w in model.trainable])
    return [
        *_offloaded_items(model, layout),
        Item("gradients", sent if waiting else 0, sent, sent, place="host"),
        replace(kept, place="disk" if layout.disk_buffers else "host"),
        _disk_item(shards, copies, layout.disk_buffers or (DISK_BUFFERS if layout.block_buffers else 0)),
        *_pass_items(model, layout),
    ]


def _offloaded_items(model: Model, layout: Layout) -> list[Item]:
    """The shards of offloaded parameters, in host memory and on a disk, and the buffers into which they are read."""
    units = list(model.units(layout.stage).values())
    weights = [(number, weight) for number, unit in enumerate(units) for weight in unit]
    sizes = [weight.padded(layout.shards) for _, weight in weights]
    kept = choose_kept(sizes, layout.max_in_cpu) if layout.block_buffers else set(range(len(sizes)))
    on_host, on_disk, blocks = 0, 0, dict.fromkeys(range(len(units)), 0)
    for place, ((number, weight), size) in enumerate(zip(weights, sizes, strict=True)):
        if place in kept:
            on_host += _round_up(model, layout, [size * weight.itemsize])
        else:
            on_disk += size * weight.itemsize
            blocks[number] += size * weight.itemsize
    return [
        _always("parameters", on_host, place="host", note="shards, which are the masters"),
        _always("parameters", on_disk, place="disk", note="shards, which are the masters"),
        _always("block buffers", min(layout.block_buffers * max(blocks.values()), on_disk), place="host"),
    ]


def _sharded_beside(model: Model, layout: Layout, state: OptimizerState, rank: int) -> list[Item]:
    """FSDP2 with masters separate from its shards.

    The shards are in the compute dtype if gradients are reduced in that dtype as well.
    """
    size, cast = layout.shards, layout.compute == layout.reduce < layout.master
    near, far = _split(model, layout)
    held = sum(w.padded(size) * (layout.compute if cast and w.trainable else w.itemsize) for w in model.weights)
    shards = [w.shard(size, rank % size) for w in near]
    # Without a cast, a gradient is a view into its unit's reduced buffer and keeps the whole buffer alive.
    near_blocks = {w.unit for w in near}
    units = [unit for unit in model.units(layout.stage).values() if near_blocks & {w.unit for w in unit}]
    whole = sum(w.padded(size) * w.itemsize for unit in units for w in unit if w.trainable)
    reduced = MASTER_SIZE * sum(shards) if cast else whole
    waiting, note = (reduced, "") if layout.sums_by_itself else (0, "")
    if layout.sums_by_itself and layout.defers:
        waiting, note = count(model.trainable) * layout.reduce, "whole while accumulating"
    return [
        _always("parameters", held, note="shards in the compute dtype" if cast else "shards"),
        Item("gradients", waiting, reduced, reduced, note=note),
        *_master_items(near, shards, state, cast),
        *_host_items(
            model,
            far,
            [w.shard(size, rank % size) for w in far],
            state,
            layout,
            layout.compute if cast else layout.master,
        ),
        *_pass_items(model, layout),
    ]


def _pass_items(model: Model, layout: Layout) -> list[Item]:
    """What FSDP2 holds during a pass: gathered parameters, hpZ's secondary shards, and buffers of collectives.

    Collectives overlap with computation, so the buffers of two blocks may exist at once.
    """
    size, compute = layout.shards, layout.compute
    units = {number: sum(w.padded(size) for w in unit) * size for number, unit in model.units(layout.stage).items()}
    rest, blocks = units.pop(0, 0), list(units.values())
    largest = max(blocks, default=0)
    kept, held = (rest + sum(blocks), "until the last backward pass of the step")
    if layout.stage == 3:
        kept, held = rest + _reach(blocks, layout), "the blocks in use, and what is outside the blocks"
    ahead = 2 * (largest or rest) * compute
    copies = sum(blocks) * compute // layout.second if layout.second else 0
    sent = layout.compute + 2 * layout.reduce
    note = "gradients of one unit, and two on their way"
    return [
        Item("gathered parameters", kept * compute, (rest if layout.stage == 3 else kept) * compute, 0, note=held),
        Item("second copies", copies, 0, 0, note=f"of the blocks, over {layout.second} ranks"),
        Item("all-gather buffers", ahead, 0, 0, note="two blocks" if blocks else "the whole model"),
        Item("reduce-scatter buffers", largest * sent, (rest or largest) * sent, 0, note=note),
    ]


def _reach(blocks: list[int], layout: Layout) -> int:
    """The largest number of elements of gathered blocks that stage 3 holds at a time."""
    if not layout.ahead:
        return sum(sorted(blocks)[-2:])
    numbers = choose_ahead(blocks, layout.ahead, layout.live)
    return max((sum(blocks[i : i + 1 + ahead]) for i, ahead in enumerate(numbers)), default=0)


def _state_item(
    weights: Iterable[Weight], elements: list[int], state: OptimizerState, cast: bool, replicas: int = 1
) -> Item:
    sizes = (MASTER_SIZE if cast else weight.itemsize for weight in weights)
    kept = round(state.copies_on(replicas) * sum(n * size for n, size in zip(elements, sizes, strict=True)))
    return _always("optimizer state", kept + state.per_parameter * len(elements))
