"""The inputs of a prediction: the sizes of the model, and how it is distributed over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dsjob.contract.sharding import stands_alone
from dsjob.contract.spec import Method

Offload = Literal["none", "optimizer", "param"]
MASTER_SIZE = 4  # bytes of an element of the fp32 masters


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter. `itemsize`: bytes per element as the model is built (see `keep_masters`).

    `unit`: the FSDP unit that shards it: 0 outside the repeated blocks, 1 and up for the blocks
    (`compute.find_blocks`). `stands_alone` decides whether a block gets its own unit.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    trainable: bool = True
    unit: int = 0

    @property
    def elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def shard(self, world_size: int, rank: int) -> int:
        """Elements of a rank's shard. FSDP2 splits the first dimension like torch.chunk, so rank 0 has the most."""
        rows, *rest = self.shape or (1,)
        chunk = math.ceil(rows / world_size)
        return max(0, min(chunk, rows - rank * chunk)) * math.prod(rest)

    def padded(self, world_size: int) -> int:
        """Elements that FSDP2 stores on every rank. It pads all shards to the length of the first."""
        return self.shard(world_size, 0)


@dataclass(frozen=True, slots=True)
class Model:
    """The parameters of a model (tied ones counted once), and the bytes of its buffers.

    `assumed`: the model whose shape is assumed, if only a number of parameters is known (`planning.shapes`).
    """

    weights: tuple[Weight, ...]
    buffers: int = 0
    assumed: str = ""

    @property
    def trainable(self) -> tuple[Weight, ...]:
        """The parameters that the optimizer updates."""
        return tuple(weight for weight in self.weights if weight.trainable)

    @property
    def blocks(self) -> int:
        """The number of repeated blocks."""
        return len({weight.unit for weight in self.weights} - {0})

    def units(self, stage: int) -> dict[int, list[Weight]]:
        """The parameters of each unit, by unit number. FSDP2 shards and gathers a unit as a whole.

        Blocks that are too small to stand alone at this ZeRO stage join unit 0.
        """
        found: dict[int, list[Weight]] = {0: []}
        for weight in self.weights:
            found.setdefault(weight.unit, []).append(weight)
        for number in [n for n, unit in found.items() if n and not stands_alone(count(unit), stage)]:
            found[0] += found.pop(number)
        return found


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The size of an optimizer's state.

    `copies`: state elements per parameter element. `per_parameter`: additional bytes per parameter tensor. `own`: with
    several ranks, additional state elements per parameter element that differ by rank. Optimizers with such state
    (error feedback) also keep a server error, which is sharded over the ranks.
    """

    copies: float
    per_parameter: int = 0
    own: float = 0

    def copies_on(self, world_size: int) -> float:
        """State elements per element of a replicated parameter, on one of `world_size` ranks."""
        return self.copies + (self.own + 1 / world_size if self.own and world_size > 1 else 0)

    def copies_saved(self, world_size: int) -> float:
        """State elements per parameter element in a checkpoint of all ranks."""
        return self.copies + (self.own * world_size + 1 if self.own and world_size > 1 else 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is distributed. `compute`, `reduce`: bytes per element of the compute and the reduction dtype.

    `accumulate`: bytes per element of the gradient accumulation dtype; 0: the stage's default. `offload`: `optimizer`
    keeps masters, their gradients and the optimizer state on the host (the share `ratio` of them), `param` keeps the
    parameters, which are the masters, there as well. `group`: ranks in a MiCS shard group; `second`: ranks in an hpZ
    group; 0: none. `ahead`: elements that stage 3 prefetches (0: one block); `live`: the most elements of blocks that
    it holds at a time. `disk_buffers`: with which masters and optimizer state are kept on a disk; 0: in memory.
    `block_buffers`: with which offloaded parameters are kept on a disk, beyond `max_in_cpu` elements; 0: in memory.
    `pinned`: what is offloaded from GPUs is in page-locked memory.

    `world_size`: the data-parallel ranks. `stages`, `context`, `tensor`: the ranks along the other axes, which hold a
    model together. `held`: the micro batches whose activations a stage of a pipeline holds at once. `most_stage`: the
    highest ZeRO stage that the pipeline's schedule allows. `master`, `state`: bytes per element of masters, and of the
    optimizer's state. `holds`: between micro steps, gradients are kept in the accumulation dtype
    (`parallel.held_sums`).
    """

    stage: int
    world_size: int
    compute: int = 4
    reduce: int = 4
    grad_accum: int = 1
    micro_batch: int = 1
    offload: Offload = "none"
    accumulate: int = 0
    ratio: float = 1.0
    group: int = 0
    second: int = 0
    ahead: int = 0
    live: int | None = None
    disk_buffers: int = 0
    block_buffers: int = 0
    max_in_cpu: int = 0
    pinned: bool = False
    stages: int = 1
    context: int = 1
    tensor: int = 1
    held: int = 1
    most_stage: int = 3
    master: int = MASTER_SIZE
    state: int = MASTER_SIZE
    holds: bool = False

    @property
    def model_ranks(self) -> int:
        """The ranks that hold a model together."""
        return self.stages * self.context * self.tensor

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole model, as `parallel.build_strategy` decides."""
        return self.stage == 0 or (self.world_size == 1 and self.offload != "param")

    @property
    def copies_to_reduce(self) -> bool:
        """Whether replicated gradients are copied for being reduced."""
        return self.world_size > 1 and (self.stages > 1 or self.reduce != self.compute)

    @property
    def shards(self) -> int:
        """The number of ranks that the model states are sharded over."""
        return self.group or self.world_size

    @property
    def defers(self) -> bool:
        """Whether gradients stay unsharded until the accumulation boundary."""
        return self.stage == 1 and not self.holds and not self.accumulate == MASTER_SIZE > self.reduce

    @property
    def sums_by_itself(self) -> bool:
        """Whether gradients accumulate where they are computed or reduced."""
        return self.grad_accum > 1 and not self.holds

    @property
    def sums_in_masters(self) -> bool:
        """Whether a rank that holds the whole model accumulates gradients in those of its separate masters."""
        beside = self.compute < self.master or self.offload == "optimizer"
        return beside and (self.accumulate == MASTER_SIZE if self.accumulate else self.stage > 1)

    @property
    def offload_problem(self) -> str:
        """Why this layout cannot be offloaded; empty if it can."""
        if self.offload == "optimizer" and self.stage == 0:
            return "offloading the optimizer needs stage 1 or higher"
        if self.offload == "param" and self.stage != 3:
            return "offloading parameters needs stage 3"
        return ""


COMPRESSING = {  # by optimizer name; sizes after the freeze step, when the state is largest
    "onebitadam": OptimizerState(2, 4, own=1),  # the worker's error
    "onebitlamb": OptimizerState(3, 16, own=1),
    "zerooneadam": OptimizerState(2, 4, own=3),  # the momentum and its sum differ by rank too
}


def count(weights: Iterable[Weight]) -> int:
    """The total number of elements of unsharded parameters."""
    return sum(weight.elements for weight in weights)


def keep_masters(model: Model, layout: Layout, state: OptimizerState) -> tuple[Model, OptimizerState]:
    """The model in the dtype of its masters, whatever dtype it is built in, as `parallel.strategy.widen` casts it; and
    the state's size in elements of masters."""
    floats = (2, MASTER_SIZE)  # others, such as float64 and quantised weights, stay what they are
    weights = tuple(replace(w, itemsize=layout.master) if w.itemsize in floats else w for w in model.weights)
    return replace(model, weights=weights), replace(state, copies=state.copies * layout.state / layout.master)


def assume_state(method: Method | None) -> tuple[OptimizerState, str]:
    """The size of an optimizer's state judged by its name, and a remark if that is a guess.

    `probe.probe_optimizer` measures it instead.
    """
    name = (method.type or "").lower() if method else ""
    params = method.params if method else {}
    if method is None:
        return OptimizerState(0), "no optimizer is named"
    if name in ("adam", "adamw"):
        return OptimizerState(3 if params.get("amsgrad") else 2, 4), ""
    if name == "lamb":
        return OptimizerState(2, 4), ""
    if name == "muon":
        return OptimizerState(2, 4), "Muon's state is taken to be as large as Adam's; of matrices it keeps half of that"
    if name in COMPRESSING:
        return COMPRESSING[name], ""
    if name == "lion":
        return OptimizerState(1), ""
    if name == "sgd":
        return OptimizerState(1 if params.get("momentum") else 0), ""
    return OptimizerState(2, 4), f"{method.label}'s state is taken to be as large as Adam's: two values a parameter"
