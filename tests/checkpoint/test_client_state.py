"""What programs for DeepSpeed keep in `client_state` comes back as it was, without pickle, on any number of ranks."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import make_engine, train_engine
from plain_checkpoint import commit_manifest
from ranks import run_ranks
from safetensors.torch import load_file

from dsjob.checkpoint.format import zero_to_fp32 as standalone
from dsjob.checkpoint.format.values import decode, encode
from dsjob.checkpoint.offline.convert import convert_to_deepspeed
from dsjob.errors import CheckpointError, CorruptCheckpointError
from dsjob.ranks.mesh import World


def make_state(rank: int = 0) -> dict[str, Any]:
    """What training scripts put there; `rank` changes it."""
    generator = torch.Generator().manual_seed(7 + rank)
    return {
        "epoch": 3,
        "args": argparse.Namespace(
            lr=1e-3, out=Path("runs/a"), since=date(2026, 1, 2), sizes=(1, 2), nested={"a": {1}}
        ),
        "config": SimpleNamespace(name="tiny"),
        "torch_rng": generator.get_state(),
        "numpy_rng": np.random.RandomState(3).get_state(),
        "numpy_generator": np.random.default_rng(3).bit_generator.state,
        "python_rng": random.Random(3).getstate(),
        "moments": torch.randn(300, 7, generator=generator).to(torch.bfloat16),
        "phases": torch.tensor([1 + 2j, 3j]),
        "nothing": torch.zeros(0, 3),
        "mask": np.array([[True, False], [False, True]]),
        "large": np.arange(200_000, dtype=np.uint64).reshape(2, -1),
        "names": np.array(["a", "bc"]),
        "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "spent": timedelta(hours=1, microseconds=5),
        "seen": {"x", 3, (1, 2)},
        "fixed": frozenset({1, 2}),
        "digest": b"\x00\xff",
        "root": 1 + 2j,
        "clock": np.datetime64("2026-01-02T03:04", "s"),
        4: {"$float": "text"},
    }


def show(value: Any) -> Any:
    """`value` in a form that `==` compares whole: types, dtypes and elements."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, (argparse.Namespace, SimpleNamespace)):
        return type(value).__name__, show(vars(value))
    if isinstance(value, dict):
        return {key: show(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(show(item) for item in value)
    return type(value).__name__, value


def save(world: World, folder: str, stage: int) -> None:
    engine = make_engine(stage)
    train_engine(engine, 0, 1)
    engine.save_checkpoint(folder, client_state=make_state(world.data_rank))


def load(world: World, folder: str, stage: int) -> Any:
    return show(make_engine(stage).load_checkpoint(folder)[1])


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (1, 0)), ((1, 1), (2, 2))])
def test_a_programs_state_comes_back_on_any_number_of_ranks(
    saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    run_ranks(save, saved[0], str(tmp_path), saved[1])
    for found in run_ranks(load, loaded[0], str(tmp_path), loaded[1]):
        assert found == show(make_state())  # rank 0's


def test_it_goes_into_a_checkpoint_for_deepspeed(tmp_path: Path) -> None:
    engine = make_engine(1)
    train_engine(engine, 0, 1)
    state = {key: value for key, value in make_state().items() if isinstance(key, str)}
    engine.save_checkpoint(tmp_path / "own", client_state=state)
    convert_to_deepspeed(str(tmp_path / "own"), str(tmp_path / "theirs"), stage=1, world_size=1)
    (path,) = (tmp_path / "theirs").glob("*/mp_rank_00_model_states.pt")
    found = torch.load(path, weights_only=False)
    assert {key: show(found[key]) for key in state} == show(state)


def test_weights_are_not_those_of_the_program(tmp_path: Path) -> None:
    """Tensors of the client state are no part of the model, wherever a checkpoint is read for its weights."""
    engine = make_engine(0)
    train_engine(engine, 0, 1)
    engine.save_checkpoint(tmp_path, client_state={"large": torch.randn(5000)})
    assert standalone.main([str(tmp_path), str(tmp_path / "out")]) == 0
    names = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert names == set(engine.module_state_dict())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: None, r"cannot save client_state\.args\.f: .* of type function"),
        (
            torch.zeros(5000, device="meta"),
            r"cannot save client_state\.args\.f: it is a Tensor of torch.float32 on meta",
        ),
        (torch.eye(3).to_sparse(), r"cannot save client_state\.args\.f"),
        (np.array([object()]), r"cannot save client_state\.args\.f: its elements are object"),
        (b"x" * (1 << 21), r"cannot save client_state\.args\.f: it has 2,097,152 bytes"),
    ],
)
def test_what_cannot_be_kept_is_named_before_anything_is_written(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        make_engine(0).save_checkpoint(tmp_path, client_state={"args": argparse.Namespace(f=value)})
    assert not list(tmp_path.glob("**/manifest.json"))


HOSTILE: list[Any] = [
    {"$stored": "model.embed.weight"},
    {"$array": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}},
    {"$array": {"dtype": "<f4", "shape": [1 << 60], "data": ""}},
    {"$array": {"dtype": "<f4", "shape": [-1, -1], "data": "AAAA"}},
    {"$array": {"dtype": [["a", "<f4"]], "shape": [1], "data": "AAAAAA=="}},
    {"$array": {"dtype": "<f4", "shape": [1], "stored": "nowhere"}},
    {"$namespace": ["a"]},
    {"$namespace": {"$items": [[1, 2]]}},
    {"$set": [[1]]},
    {"$set": 5},
    {"$datetime": "yesterday"},
    {"$timedelta": [1e300, 0, 0]},
    {"$complex": ["x"]},
    {"$bytes": "?"},
    {"$path": 5},
    {"$scalar": {"dtype": "<f4", "shape": [2], "data": "AAAAAAAAAAA="}},
]


@pytest.mark.parametrize("value", HOSTILE)
def test_what_was_never_saved_is_refused_as_damage(value: Any, tmp_path: Path) -> None:
    engine = make_engine(0)
    engine.save_checkpoint(tmp_path, tag="one")
    (folder,) = tmp_path.glob("one-a*")
    text = json.dumps({**json.loads((folder / "state.json").read_text()), "client_state": {"a": value}})
    (folder / "state.json").write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    commit_manifest(tmp_path, folder, "one", 0)
    with pytest.raises(CorruptCheckpointError, match="cannot restore the state in"):
        engine.load_checkpoint(tmp_path)


def test_sets_are_the_same_text_on_every_rank() -> None:
    names = [f"name{number}" for number in range(50)]
    kept = encode(set(names))
    assert kept == {"$set": sorted(names)}  # whatever the hash seed of the process
    assert decode(kept) == set(names)
