"""Checkpoints of models whose layers ranks divide: they have the whole model's names, and load into any layout."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from divided import MODELS, make_batch
from ranks import run_ranks

import dsjob
from dsjob.checkpoint.live.weights import read_weights
from dsjob.engine.engine import Engine
from dsjob.ranks.mesh import World

pytestmark = pytest.mark.slow

Cell = tuple[int, int]  # ZeRO stage, ranks among which layers are divided
# Stages 0 and 3 x 1, 2 and 4 ranks: GPT-2's queries, keys and values are one layer of three sections.
SOME: list[Cell] = [(3, 2), (0, 4)]
ALL: list[Cell] = [(0, 1), (3, 1), (0, 2), (1, 2), (3, 2), (0, 4), (2, 4)]


def make_engine(name: str, cell: Cell, optimizer: str = "AdamW") -> Engine:
    stage, size = cell
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": optimizer, "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"size": size},
    }
    return dsjob.initialize(model=MODELS[name](), config=config)[0]


def train(engine: Engine, name: str, steps: range) -> list[float]:
    """Losses of whole batches."""
    losses = []
    for step in steps:
        rows = make_batch(step, 8, ours=name == "gpt")
        loss = engine(**{key: t.chunk(engine.world.data_size)[engine.world.data_rank] for key, t in rows.items()})[
            "loss"
        ]
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / torch.distributed.get_world_size())
    return losses


def reshard(world: World, name: str, cells: list[Cell], folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for cell in cells:
        engine = make_engine(name, cell)
        engine.save_checkpoint(f"{folder}/{cell}", tag="initial")
        train(engine, name, range(2))
        engine.save_checkpoint(f"{folder}/{cell}", tag="trained")
        found[cell] = train(engine, name, range(2, 4))
    for saved in cells:
        for cell in cells:
            again = make_engine(name, cell)
            again.load_checkpoint(f"{folder}/{saved}", tag="trained")
            found[saved, cell] = train(again, name, range(2, 4))
    engine = make_engine(name, (0, 2))
    engine.load_module_state_dict({key: value + 1 for key, value in MODELS[name]().state_dict().items()})
    engine.save_16bit_model(folder, "weights.bin")
    found["names"] = sorted(engine.state().model_tensors())
    return found


@pytest.mark.parametrize(
    ("name", "cells"), [("gpt2", SOME), ("gpt2", ALL), ("llama", ALL[:5])], ids=["some", "all", "llama"]
)
@pytest.mark.full("all", "llama")
def test_a_checkpoint_loads_into_every_layout(name: str, cells: list[Cell]) -> None:
    initial = {key: parameter.detach() for key, parameter in MODELS[name]().named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(reshard, 4, name, cells, folder)[0]
        for cell in cells:
            # The bytes are those of a run that divides nothing.
            weights = read_weights(f"{folder}/{cell}", tag="initial")
            assert all(torch.equal(weights[key], weight) for key, weight in initial.items()), cell
            for saved in cells:
                exact = saved == cell
                expected = found[saved] if exact else pytest.approx(found[saved], rel=1e-5)
                assert found[saved, cell] == expected, (saved, cell)
        exported = torch.load(f"{folder}/weights.bin")
        assert all(torch.equal(exported[key], weight + 1) for key, weight in initial.items())
        assert [key.removeprefix("model.") for key in found["names"]] == sorted(initial)
