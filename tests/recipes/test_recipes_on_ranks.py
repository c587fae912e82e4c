"""The recipes' models spread over ranks: every stage gives the losses of the unsharded model."""

import warnings

import pytest
import torch
from engines import make_engine
from ranks import run_ranks

from dsjob.ranks.mesh import World
from dsjob.recipes import t5


def train_t5(world: World) -> list[list[float]]:
    dataset = t5.build_dataset(max_samples=64)
    found = []
    for stage in range(4):
        torch.manual_seed(0)
        losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # before the engine, which hides FSDP2's warning of T5's views
            engine = make_engine(stage, net=t5.build("tiny"), train_micro_batch_size_per_gpu=2)
            for step in range(4):
                first = (step * world.data_size + world.data_rank) * 2
                loss = engine(**t5.collate([dataset[first], dataset[first + 1]])).loss
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        found.append(losses)
    return found


@pytest.mark.slow
def test_t5_learns_the_same_at_every_stage() -> None:
    for found in run_ranks(train_t5, 2):
        for stage in (1, 2, 3):
            assert found[stage] == pytest.approx(found[0], abs=1e-5)
        assert found[0][-1] < found[0][0]
