"""The parity grid: every ZeRO stage gives what stage 0 gives, in each precision, accumulation, kind of model and world.

An axis grows by an entry in its table. The processes of a world size are started once and run all of its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from engines import ADAMW, build_net, read_fixture, train_by_hand, train_engine, whole_state
from net import Net
from ranks import run_ranks
from torch import Tensor

import dsjob
from dsjob.contract import sharding
from dsjob.ranks.mesh import World

pytestmark = pytest.mark.slow

Config = dict[str, Any]
STAGES = (0, 1, 2, 3)
ACCUMULATIONS = (1, 3)
ROWS = 12
SMALL_BLOCK = sharding.SMALL_BLOCK

PRECISIONS: dict[str, Config] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def build_frozen() -> Net:
    net = build_net()
    net.emb.requires_grad_(False)
    net.blocks[1].requires_grad_(False)
    return net


def build_tied() -> Net:
    net = build_net()
    net.head.weight = net.emb.weight
    return net


@dataclass(frozen=True)
class Kind:
    """What is trained, and what the config says beside stage, precision and accumulation, merged section by section.

    `base`: the kind that it has to agree with, at stage 0; itself where empty.
    """

    build: Callable[[], Net]
    config: Config = field(default_factory=dict)
    stages: tuple[int, ...] = STAGES
    base: str = ""


ON_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
KINDS = {
    "plain": Kind(build_net),
    "frozen": Kind(build_frozen),
    "tied": Kind(build_tied),
    "checkpointed": Kind(build_net, {"activation_checkpointing": {"mode": "full"}}, base="plain"),
    "offloaded": Kind(build_net, ON_HOST, stages=(1, 2, 3), base="plain"),
}

# The largest difference that passes: of losses (relative), of single parameters, and of all parameters on average.
# Below fp32 stages add gradients up in different orders and dtypes, and where a gradient is all but zero,
# Adam makes a whole step, 0.01, of rounding's sign.
TOLERANCE: dict[str, tuple[float, float, float]] = {
    "fp32": (1e-6, 1e-6, 1e-7),
    "bf16": (3e-3, 0.06, 1e-3),
    "fp16": (5e-4, 0.06, 1e-3),
    "autocast": (3e-3, 0.06, 1e-3),
}
# From DeepSpeed's own curves, in fp32 and bf16; those of fp32 for the other two.
CURVES = {"fp32": 1e-4, "bf16": 4e-3, "fp16": 5e-4, "autocast": 4e-3}


@dataclass(frozen=True)
class Cell:
    """A point of the grid."""

    stage: int
    precision: str
    accumulation: int
    kind: str

    @property
    def base(self) -> Cell:
        """The cell at stage 0 that this one has to agree with."""
        return Cell(0, self.precision, self.accumulation, KINDS[self.kind].base or self.kind)

    @property
    def is_there(self) -> bool:
        return self.stage in KINDS[self.kind].stages


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    norm: float
    frozen: set[str]


CELLS = [cell for point in product(STAGES, PRECISIONS, ACCUMULATIONS, KINDS) if (cell := Cell(*point)).is_there]
# The accumulations of each kind in fp32, and the precisions beside it, with three micro batches. All stages have all.
COVERING: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "plain": ((1, 3), ("bf16", "fp16", "autocast")),
    "frozen": ((1,), ("bf16",)),
    "tied": ((3,), ("fp16",)),
    "checkpointed": ((1,), ("autocast",)),
    "offloaded": ((3,), ("bf16",)),
}
COVERED = [
    cell
    for cell in CELLS
    if (cell.accumulation in COVERING[cell.kind][0] and cell.precision == "fp32")
    or (cell.accumulation == 3 and cell.precision in COVERING[cell.kind][1])
]


def thin(cells: list[Cell]) -> list[Cell]:
    """The plain cells, and the others in fp32. Of those that are plain and in fp32, all stages; of the others, stage 0
    and one more stage in turn."""
    cells = [cell for cell in cells if cell.kind == "plain" or cell.precision == "fp32"]
    points = list(dict.fromkeys((cell.precision, cell.accumulation, cell.kind) for cell in cells))
    turn = {point: 1 + number % 3 for number, point in enumerate(points)}
    return [
        cell
        for cell in cells
        if cell.stage in (0, turn[cell.precision, cell.accumulation, cell.kind])
        or (cell.kind, cell.precision) == ("plain", "fp32")
    ]


GRIDS = {  # ranks, cells, steps
    "one rank": (1, COVERED, 2),
    "two ranks": (2, thin(COVERED), 2),
    "one rank, whole": (1, CELLS, 4),
    "two ranks, whole": (2, CELLS, 4),
}
each_grid = pytest.mark.parametrize(
    "grid",
    [
        "one rank",
        "two ranks",
        *(pytest.param(f"{n}, whole", marks=pytest.mark.full) for n in ("one rank", "two ranks")),
    ],
)


def merge(*configs: Config) -> Config:
    merged: Config = {}
    for config in configs:
        for key, value in config.items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


def run_cells(world: World, cells: list[Cell], steps: int) -> dict[Cell, Outcome]:
    found = {}
    for cell in cells:
        kind = KINDS[cell.kind]
        # Blocks as small as these are units of their own at stage 3 alone: here at all stages, in half of the cells.
        sharding.SMALL_BLOCK = 0 if cell.accumulation == 1 else SMALL_BLOCK
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": cell.accumulation}
        config = merge(sizes, {"optimizer": ADAMW, "zero_optimization": {"stage": cell.stage}})
        config = merge(config, PRECISIONS[cell.precision], kind.config)
        engine = dsjob.initialize(model=kind.build(), config=config)[0]
        losses = train_engine(engine, 0, steps, ROWS)
        weights = {n: t for n, t in whole_state(engine).items() if n.startswith("model.")}
        frozen = {f"model.{n}" for n in engine.strategy.weights() if n not in engine.strategy.masters}
        assert engine.skipped_steps == 0
        found[cell] = Outcome(losses, weights, engine.get_global_grad_norm(), frozen)
    return found


@cache
def run_grid(grid: str) -> list[dict[Cell, Outcome]]:
    """The outcomes of a grid's cells, by rank."""
    return run_ranks(run_cells, *GRIDS[grid])


def differ(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, float]:
    """The largest and the mean difference of two models' parameters."""
    assert set(ours) == set(theirs)
    differences = torch.cat([(ours[name].float() - theirs[name].float()).abs().flatten() for name in ours])
    return float(differences.max()), float(differences.mean())


def iterate(grid: str) -> Iterator[tuple[Cell, Outcome, dict[Cell, Outcome]]]:
    for found in run_grid(grid):
        for cell, outcome in found.items():
            yield cell, outcome, found


@each_grid
def test_every_stage_agrees_with_stage_0(grid: str) -> None:
    for cell, outcome, found in iterate(grid):
        losses, largest, mean = TOLERANCE[cell.precision]
        base = found[cell.base]
        assert outcome.losses == pytest.approx(base.losses, rel=losses), cell
        assert outcome.norm == pytest.approx(base.norm, rel=max(losses, 5e-6)), cell
        worst, average = differ(outcome.weights, base.weights)
        assert (worst <= largest, average <= mean) == (True, True), (cell, worst, average)


@each_grid
def test_ranks_hold_the_same_model_and_frozen_parts_stay(grid: str) -> None:
    first = run_grid(grid)[0]
    for cell, outcome, _ in iterate(grid):
        for name, weight in outcome.weights.items():
            assert torch.equal(weight, first[cell].weights[name]), (cell, name)
        start = {f"model.{name}": tensor for name, tensor in KINDS[cell.kind].build().state_dict().items()}
        assert len(outcome.frozen) == (6 if cell.kind == "frozen" else 0)
        for name in outcome.frozen:
            assert torch.equal(outcome.weights[name].float(), start[name].to(outcome.weights[name].dtype).float()), cell


@pytest.mark.parametrize("kind", KINDS)
@each_grid
def test_fp32_is_what_plain_pytorch_gives(grid: str, kind: str) -> None:
    expected = {
        f"model.{name}": weight for name, weight in train_by_hand(GRIDS[grid][2], ROWS, KINDS[kind].build()).items()
    }
    for cell, outcome, _ in iterate(grid):
        if cell.kind == kind and cell.precision == "fp32":
            ours = {name: outcome.weights[name] for name in expected}
            assert differ(ours, expected)[0] <= 2e-6, cell


def follow_curves(world: World, every: int, steps: int) -> dict[tuple[str, int, str], float]:
    """The largest difference from each of DeepSpeed's curves, by precision, stage and curve; or from each n-th curve,
    another one at each precision and stage."""
    batches, found = read_fixture("batches.json")[str(world.data_rank)], {}
    for first, (precision, stage) in enumerate(product(PRECISIONS, STAGES)):
        dtype = precision if precision == "bf16" else "fp32"
        curves = [run for run in read_fixture("losses.json") if run["dtype"] == dtype and run["stage"] in (0, 3)]
        for number, run in enumerate(curves):
            if (number + first + first // len(STAGES)) % every:
                continue
            config = {key: value for key, value in run["config"].items() if key not in ("bf16", "zero_optimization")}
            config = merge(config, PRECISIONS[precision], {"zero_optimization": {"stage": stage}})
            engine = dsjob.initialize(model=build_net(), config=config)[0]
            worst = 0.0
            for (x, y), theirs in zip(batches[:steps], run["rank0_micro_losses"], strict=False):
                loss = engine(torch.tensor(x), torch.tensor(y))
                worst = max(worst, abs(float(loss.detach()) - theirs))
                engine.backward(loss)
                engine.step()
            found[precision, stage, f"curve {number}"] = worst
    return found


@pytest.mark.parametrize(("every", "steps"), [(4, 8), pytest.param(1, 20, marks=pytest.mark.full)])
def test_every_precision_and_stage_follows_deepspeeds_curves(every: int, steps: int) -> None:
    found = run_ranks(follow_curves, 2, every, steps)[0]
    cells = {(precision, stage) for precision, stage, _ in found}
    assert [{cell[axis] for cell in cells} for axis in (0, 1)] == [set(PRECISIONS), set(STAGES)]
    assert len(cells) == (16 if every == 1 else 8)
    for (precision, stage, curve), worst in found.items():
        assert worst <= CURVES[precision], (precision, stage, curve, worst)
