"""A job as the arithmetic sees it: the sizes of its model, and how they are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dsjob.contract.sharding import stands_alone
from dsjob.contract.spec import Method

Offload = Literal["none", "optimizer", "param"]
MASTER_SIZE = 4  # bytes of an element of the fp32 masters


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter: its shape, bytes an element as the model is built, and the unit it is sharded in.

    `unit`: 0 for what is outside the repeated blocks, from 1 for the blocks (`compute.find_blocks`); see
    `stands_alone`.
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
        """Elements of a rank's shard: FSDP2 cuts the first dimension as torch.chunk does, so rank 0 has the most."""
        rows, *rest = self.shape or (1,)
        chunk = math.ceil(rows / world_size)
        return max(0, min(chunk, rows - rank * chunk)) * math.prod(rest)

    def padded(self, world_size: int) -> int:
        """Elements that FSDP2 stores on every rank: all shards are as long as the first."""
        return self.shard(world_size, 0)


@dataclass(frozen=True, slots=True)
class Model:
    """The parameters of a model (tied ones once), and the bytes of its buffers.

    `blocks_known`: false where a number of parameters was given in place of a model.
    """

    weights: tuple[Weight, ...]
    buffers: int = 0
    blocks_known: bool = True

    @classmethod
    def of_count(cls, parameters: int) -> Model:
        """A model of which nothing is known but the number of its parameters."""
        return cls((Weight((parameters,)),), blocks_known=False)

    @property
    def trainable(self) -> tuple[Weight, ...]:
        """The parameters that an optimizer steps."""
        return tuple(weight for weight in self.weights if weight.trainable)

    @property
    def blocks(self) -> int:
        """How many repeated blocks there are."""
        return len({weight.unit for weight in self.weights} - {0})

    def units(self, stage: int) -> dict[int, list[Weight]]:
        """The parameters of each unit that is sharded as one at a ZeRO stage."""
        found: dict[int, list[Weight]] = {0: []}
        for weight in self.weights:
            found.setdefault(weight.unit, []).append(weight)
        for number in [n for n, unit in found.items() if n and not stands_alone(count(unit), stage)]:
            found[0] += found.pop(number)
        return found


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an optimizer keeps: elements of state for each element, and bytes for each parameter beside them.

    `own`: elements more where there are several ranks, that differ by rank; a rank's share of a whole one, of error
    feedback, comes with them.
    """

    copies: float
    per_parameter: int = 0
    own: float = 0

    def copies_on(self, world_size: int) -> float:
        """Elements of state for each element of a replicated parameter, on one of `world_size` ranks."""
        return self.copies + (self.own + 1 / world_size if self.own and world_size > 1 else 0)

    def copies_saved(self, world_size: int) -> float:
        """Elements of state for each element in a checkpoint."""
        return self.copies + (self.own * world_size + 1 if self.own and world_size > 1 else 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is spread. `compute` and `reduce`: bytes an element in which it computes and reduces gradients.

    `accumulate`: bytes an element in which micro batches add up; 0: as the stage has it. `offload`: `optimizer` keeps
    masters, their gradients and the optimizer's state on the host, or a share of them (`ratio`), `param` the parameters
    as masters. `group`: ranks over which MiCS shards; `second`: those that hold hpZ's second copy; 0: none.
    `ahead`, `live`: elements of blocks that stage 3 gathers ahead, and at a time; 0: one block ahead.
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

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole model, as `parallel.build_strategy` decides."""
        return self.stage == 0 or (self.world_size == 1 and self.offload != "param")

    @property
    def shards(self) -> int:
        """Ranks that model states are spread over."""
        return self.group or self.world_size

    @property
    def defers(self) -> bool:
        """Whether sharded gradients stay whole until the boundary."""
        return self.stage == 1 and not self.accumulate == MASTER_SIZE > self.reduce

    @property
    def sums_in_masters(self) -> bool:
        """Whether a rank that holds the whole model adds up in the gradients of masters beside it."""
        beside = self.compute < MASTER_SIZE or self.offload == "optimizer"
        return beside and (self.accumulate == MASTER_SIZE if self.accumulate else self.stage > 1)

    @property
    def offload_problem(self) -> str:
        """Why this layout cannot be offloaded; empty where it can."""
        if self.offload == "optimizer" and self.stage == 0:
            return "offloading the optimizer needs stage 1 or higher"
        if self.offload == "param" and self.stage != 3:
            return "offloading parameters needs stage 3"
        return ""


COMPRESSING = {  # by the name of the optimizer: after its freeze step, when there is most
    "onebitadam": OptimizerState(2, 4, own=1),  # the worker's error
    "onebitlamb": OptimizerState(3, 16, own=1),
    "zerooneadam": OptimizerState(2, 4, own=3),  # the momentum and its sum differ by rank too
}


def count(weights: Iterable[Weight]) -> int:
    """Elements of whole parameters."""
    return sum(weight.elements for weight in weights)


def assume_state(method: Method | None) -> tuple[OptimizerState, str]:
    """What an optimizer keeps, by its name alone, and a remark where that is a guess; `probe.probe_optimizer` looks."""
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
