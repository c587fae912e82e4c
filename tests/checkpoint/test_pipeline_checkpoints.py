"""A checkpoint of a pipeline has the names of the whole model, so it loads into any other layout, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import WIDTH, WORDS, deal, make_engine
from ranks import run_ranks
from torch import nn

from dsjob.deepspeed.pipe import LayerSpec
from dsjob.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from dsjob.errors import CheckpointError
from dsjob.ranks.mesh import World

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}


def make(world: World, stages: int, stage: int, **given: Any) -> Any:
    micro = 8 * stages // world.everyone.size
    return make_engine(world, stages, micro=micro, stage=stage, config={"scheduler": SCHEDULE}, **given)


def go_on(engine: Any, first: int, steps: int) -> list[float]:
    batches = list(deal(engine.world, engine.micro_batches, first + steps))[first * engine.micro_batches :]
    given = iter(batches)
    return [float(engine.train_batch(given)) for _ in range(steps)]


def save(world: World, folder: str, stages: int, stage: int, chunks: int = 1) -> list[float]:
    engine = make(world, stages, stage, chunks=chunks)
    go_on(engine, 0, 3)
    engine.save_checkpoint(f"{folder}/saved", client_state={"note": "hello"})
    return go_on(engine, 3, 2)


def load(world: World, folder: str, stages: int, stage: int, chunks: int = 1) -> tuple[list[float], int, Any]:
    engine = make(world, stages, stage, chunks=chunks, base_seed=5)  # other initial weights
    _, client = engine.load_checkpoint(f"{folder}/saved")
    engine.save_checkpoint(f"{folder}/again-{world.everyone.size}-{stages}-{stage}")
    return go_on(engine, 3, 2), engine.global_steps, client


Layout = tuple[int, int, int]  # ranks, stages, ZeRO stage
WAYS: list[tuple[Layout, list[Layout]]] = [((2, 2, 0), [(2, 2, 0), (1, 1, 0), (4, 2, 1)])]
MORE: list[tuple[Layout, list[Layout]]] = [
    ((4, 2, 3), [(2, 2, 0), (1, 1, 0), (4, 4, 0), (4, 1, 2)]),
    ((1, 1, 0), [(2, 2, 0), (4, 2, 2), (4, 4, 0)]),
    ((4, 4, 0), [(4, 2, 1), (2, 1, 3), (3, 3, 0)]),
]


@pytest.mark.parametrize(("saved", "loaded"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.full) for way in MORE)])
def test_a_checkpoint_loads_into_any_layout(saved: Layout, loaded: list[Layout], tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = run_ranks(save, saved[0], folder, *saved[1:])[0]
    whole = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/saved")
    assert {"0.words.weight", "4.out.bias"} <= whole.keys()
    assert not any(name.startswith("5.") for name in whole)  # tied to layer 0
    for ranks, stages, stage in loaded:
        for losses, steps, client in run_ranks(load, ranks, folder, stages, stage):
            same = (ranks, stages, stage) == saved
            assert losses == (expected if same else pytest.approx(expected, rel=1e-5))
            assert (steps, client) == (5, {"note": "hello"})
        again = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/again-{ranks}-{stages}-{stage}")
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def refuse(world: World, folder: str) -> str:
    from pipelines import list_specs

    engine = make(world, 2, 0, layers=list_specs(5))
    with pytest.raises(CheckpointError) as found:
        engine.load_checkpoint(f"{folder}/saved")
    with pytest.raises(Exception, match="save_16bit_model writes one file"):
        engine.save_16bit_model(folder)
    return found.value.message


def test_another_model_is_refused(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), 2, 0)
    for told in run_ranks(refuse, 2, str(tmp_path)):
        assert "does not match the model" in told
        assert "not in the checkpoint: model.5." in told


def drop(world: World, folder: str) -> tuple[list[float], list[float]]:
    """Losses of a run whose layers drop activations, and of one that resumes it; only the first was evaluated."""
    layers = [LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(nn.Dropout, 0.5), LayerSpec(nn.Linear, WIDTH, WORDS)]
    engine = make(world, 2, 0, layers=layers)
    go_on(engine, 0, 1)
    engine.eval_batch(deal(engine.world, engine.micro_batches, 1))
    engine.save_checkpoint(folder)
    again = make(world, 2, 0, layers=layers)
    again.load_checkpoint(folder)
    return go_on(engine, 1, 2), go_on(again, 1, 2)


def test_seeded_layers_go_on_with_the_numbers_of_their_step(tmp_path: Path) -> None:
    for expected, resumed in run_ranks(drop, 2, str(tmp_path)):
        assert resumed == expected
