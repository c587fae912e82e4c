"""The parity grid over the mesh: a job that is divided along any axes gives what it gives on one process, in each
precision and at each ZeRO stage, on the CPU and on a simulated CUDA device.

An axis grows by an entry in its table. The ranks of a world size are started once and run all of its cells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pipelined_models
import pytest
import torch
from job_documents import make_job, resolve
from ranks import run_ranks
from simulated_cuda import find_device
from simulated_cuda.build import build, find_obstacle
from torch import Tensor

from dsjob import storage
from dsjob.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from dsjob.document.resolve import complete_job
from dsjob.ranks.mesh import World
from dsjob.training import job
from dsjob.trust.grant import Trust

pytestmark = pytest.mark.slow

STEPS = 4
TRUST = Trust(folders=(str(Path(pipelined_models.__file__).parent),))
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 10}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
PIPE: dict[str, Any] = {"pipeline": {"stages": 2}}
TENSOR: dict[str, Any] = {"tensor_parallel": {"size": 2}}
SEQUENCES: dict[str, Any] = {"tensor_parallel": {"size": 2, "sequence_parallel": True, "loss_parallel": True}}
CONTEXT: dict[str, Any] = {"context_parallel": {"size": 2}}


class Layout(NamedTuple):
    """The ranks of a mesh, data-parallel ones included, and the sections that divide them."""

    ranks: int
    sections: dict[str, Any]

    @property
    def data(self) -> int:
        """The number of data-parallel ranks."""
        sizes = (section.get("size", section.get("stages", 1)) for section in self.sections.values())
        return self.ranks // math.prod(sizes)


LAYOUTS: dict[str, Layout] = {
    "alone": Layout(1, {}),
    "pipe": Layout(2, PIPE),
    "tensor": Layout(2, TENSOR),
    "context": Layout(2, CONTEXT),
    "pipe x data": Layout(4, PIPE),
    "tensor x data": Layout(4, TENSOR),
    "sequences x data": Layout(4, SEQUENCES),
    "context x data": Layout(4, CONTEXT),
    "pipe x tensor": Layout(4, {**PIPE, **TENSOR}),
    "context x tensor": Layout(4, {**CONTEXT, **TENSOR}),
    "pipe x data x tensor": Layout(8, {**PIPE, **TENSOR}),
    "data x context x tensor": Layout(8, {**CONTEXT, **TENSOR}),
}
# The largest difference that passes: of losses and norms (relative), of single parameters, and of all parameters on
# average. Below fp32 ranks add up in other orders and dtypes, and where a gradient is all but zero, Adam makes a whole
# step, 0.01, of rounding's sign.
TOLERANCE: dict[str, tuple[float, float, float, float]] = {
    "fp32": (1e-5, 1e-4, 1e-5, 1e-6),
    "bf16": (1e-2, 5e-2, 0.06, 2e-3),
    "fp16": (2e-3, 2e-2, 0.06, 1e-3),
    "autocast": (1e-2, 5e-2, 0.06, 2e-3),
}


class Cell(NamedTuple):
    """A point of the grid."""

    layout: str
    precision: str
    stage: int


# ZeRO shards over data-parallel ranks: without several, all stages are the same.
CELLS = [
    Cell(layout, precision, stage)
    for layout, precision, stage in product(LAYOUTS, PRECISIONS, range(4))
    if stage == 0 or LAYOUTS[layout].data > 1
]
# Some of each precision; the tests of each axis have more.
FEW = [
    Cell("pipe", "fp16", 0),
    Cell("context", "bf16", 0),
    Cell("pipe x data", "fp32", 3),
    Cell("pipe x tensor", "bf16", 0),
]
ON_DEVICE = [Cell("context", "fp32", 0), Cell("pipe", "bf16", 0), Cell("tensor", "fp16", 0)]
# On a device, ranks run the cells of one precision at a time: all would take longer than a test may.
GRIDS = {
    "few": FEW,
    "all": CELLS,
    "few on a device": ON_DEVICE,
    **{f"{name} on a device": [cell for cell in CELLS if cell.precision == name] for name in PRECISIONS},
}


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    weights: dict[str, Tensor]
    hazards: list[str]


def make_document(cell: Cell, folder: str) -> dict[str, Any]:
    rows = {"_target_": "pipelined_models.Tokens", "length": 32}
    return make_job(
        model={"_target_": "pipelined_models.build_llama", "layers": 2, "heads": 4},
        data={"train": rows, "eval": {**rows, "seed": 1}},
        trainer={"train_batch": 16, "grad_accum": 2, "max_steps": STEPS, "log_every": 1},
        optimizer={"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}},
        gradient_clipping=0.5,
        zero_optimization={"stage": cell.stage},
        output={"dir": folder},
        **LAYOUTS[cell.layout].sections,
        **PRECISIONS[cell.precision],
    )


def run(world: World, documents: list[dict[str, Any]]) -> list[list[str]]:
    """Runs jobs; what each has used out of order on a simulated device."""
    device, hazards = find_device(), []
    for document in documents:
        resolved = resolve(document, world_size=world.everyone.size)
        folder = resolved["output"]["dir"]
        storage.make_folder(folder)
        job.run_job(complete_job(resolved), folder, world, TRUST)
        hazards.append(device.take_hazards() if device is not None else [])
    return hazards


def read(folder: str, hazards: list[str]) -> Outcome:
    records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    lists = ([each[name] for each in records if name in each] for name in ("loss", "grad_norm", "eval/loss"))
    return Outcome(*lists, get_fp32_state_dict_from_zero_checkpoint(f"{folder}/checkpoints"), hazards)


def run_cells(cells: list[Cell], ranks: int, library: Path | None = None) -> dict[Cell, Outcome]:
    with TemporaryDirectory() as folder:
        documents = [make_document(cell, f"{folder}/{number}") for number, cell in enumerate(cells)]
        told = run_ranks(run, ranks, documents, library=library)
        return {
            cell: read(f"{folder}/{number}", [hazard for hazards in told for hazard in hazards[number]])
            for number, cell in enumerate(cells)
        }


@cache
def run_alone(precision: str) -> Outcome:
    cell = Cell("alone", precision, 0)
    return run_cells([cell], 1)[cell]


def choose(grid: str, ranks: int) -> list[Cell]:
    return [cell for cell in GRIDS[grid] if LAYOUTS[cell.layout].ranks == ranks]


def list_cases() -> Iterator[Any]:
    for grid, ranks in product(GRIDS, (2, 4, 8)):
        lacks = "device" in grid and find_obstacle() is not None
        marks = [pytest.mark.skip(reason=find_obstacle() or "")] if lacks else []
        if choose(grid, ranks):
            yield pytest.param(grid, ranks, marks=marks if (grid, ranks) == ("few", 4) else [*marks, pytest.mark.full])


@pytest.mark.parametrize(("grid", "ranks"), list(list_cases()))
def test_every_layout_agrees_with_one_process(grid: str, ranks: int) -> None:
    for cell, outcome in run_cells(choose(grid, ranks), ranks, build() if "device" in grid else None).items():
        alone, (losses, norms, largest, mean) = run_alone(cell.precision), TOLERANCE[cell.precision]
        assert len(outcome.losses) == STEPS
        assert outcome.losses == pytest.approx(alone.losses, rel=losses), cell
        assert outcome.evaluated == pytest.approx(alone.evaluated, rel=losses), cell
        assert outcome.norms == pytest.approx(alone.norms, rel=norms), cell
        assert outcome.weights.keys() == alone.weights.keys()
        differences = torch.cat([(outcome.weights[n] - each).abs().flatten() for n, each in alone.weights.items()])
        assert (float(differences.max()) <= largest, float(differences.mean()) <= mean) == (True, True), cell
        assert outcome.hazards == []
