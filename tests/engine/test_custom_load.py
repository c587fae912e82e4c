"""`load_checkpoint(custom_load_fn=...)`: a program puts the weights of a checkpoint into its model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_net, make_engine, train_engine, whole_state
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.ranks.mesh import World


class Renamed(nn.Module):
    """The network of the fixtures below another name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_net()

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def rename(src: dict[str, Tensor], dst: nn.Module) -> None:
    dst.load_state_dict({f"inner.{name}": weight for name, weight in src.items()})


def save(world: World, folder: str, stage: int) -> dict[str, Any]:
    """The state one step after the save; `kept`: the weights that were saved."""
    engine = make_engine(stage)
    train_engine(engine, 0, 2)
    engine.save_checkpoint(folder)
    kept = {name: value for name, value in whole_state(engine).items() if name.startswith("model.")}
    train_engine(engine, 2, 1)
    return {**whole_state(engine), "kept": kept}


def load(world: World, folder: str, stage: int) -> tuple[dict[str, Tensor], int]:
    engine = make_engine(stage, net=Renamed())
    train_engine(engine, 5, 1)
    url, _ = engine.load_checkpoint(folder, custom_load_fn=rename, load_optimizer_states=False)
    assert url is not None
    weights = {name: value for name, value in whole_state(engine).items() if name.startswith("model.")}
    train_engine(engine, 2, 1)
    return weights, engine.global_steps


def load_plainly(world: World, folder: str, stage: int) -> dict[str, Tensor]:
    engine = make_engine(stage)
    engine.load_checkpoint(folder, custom_load_fn=lambda src, dst: dst.load_state_dict(src))
    train_engine(engine, 2, 1)
    return whole_state(engine)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.full("2", "0")
def test_weights_go_into_another_model(tmp_path: Path, stage: int) -> None:
    expected = run_ranks(save, 2, str(tmp_path), stage)[0]
    kept = expected.pop("kept")
    for weights, steps in run_ranks(load, 2, str(tmp_path), stage):
        assert steps == 3
        assert weights.keys() == {name.replace("model.", "model.inner.") for name in kept}
        assert all(torch.equal(weights[name.replace("model.", "model.inner.")], value) for name, value in kept.items())
    for state in run_ranks(load_plainly, 2, str(tmp_path), stage):
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
