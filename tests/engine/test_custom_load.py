"""`load_checkpoint(custom_load_fn=...)`: a program puts the weights of a checkpoint into its model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_net, make_config, make_engine, make_tokens, train_engine, whole_state
from ranks import run_ranks
from torch import Tensor, nn

import dsjob.deepspeed
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


def copy_parameters(src: dict[str, Tensor], dst: nn.Module) -> None:
    for name, parameter in dst.named_parameters():
        assert parameter.shape == src[name].shape
        parameter.data.copy_(src[name])


def fill_state(src: dict[str, Tensor], dst: nn.Module) -> None:
    own = dst.state_dict()
    own.update(src)
    dst.load_state_dict(own)


def load_in_every_way(world: World, folder: str) -> list[tuple[str, bool]]:
    """Whether the next step is that of the engine that has saved; also after an evaluation, which leaves parameters
    gathered, and with an engine that always keeps them so."""
    rows = []
    for number, (stage, bf16) in enumerate(((0, True), (1, False), (2, True), (3, False))):
        saving = make_engine(stage, bf16=bf16)
        train_engine(saving, 0, 1)
        saving.save_checkpoint(folder)
        train_engine(saving, 1, 1)
        expected = whole_state(saving)
        config = make_config(stage, bf16=bf16)
        for initialize in (dsjob.initialize, dsjob.deepspeed.initialize):
            function = (fill_state, copy_parameters)[(number + (initialize is dsjob.initialize)) % 2]
            engine = initialize(model=build_net(), config=config)[0]
            with torch.no_grad():
                engine(*make_tokens(7, 2))
            engine.load_checkpoint(folder, custom_load_fn=function)
            train_engine(engine, 1, 1)
            found = whole_state(engine)
            same = all(torch.equal(found[name], value) for name, value in expected.items())
            rows.append((f"stage {stage}, {bf16=}, {function.__name__}, {initialize.__module__}", same))
    return rows


def test_a_program_may_load_in_any_way_at_every_stage(tmp_path: Path) -> None:
    for rows in run_ranks(load_in_every_way, 2, str(tmp_path)):
        assert [name for name, same in rows if not same] == []
