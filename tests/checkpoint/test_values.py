"""State in JSON and back: exactly, or not at all."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import make_engine
from hypothesis import given
from hypothesis import strategies as st
from plain_checkpoint import commit_manifest

from dsjob.checkpoint.format.values import decode, encode
from dsjob.checkpoint.live.rng import capture_rng, restore_rng
from dsjob.checkpoint.offline.convert import convert_to_deepspeed
from dsjob.compute.activation.rng import TRACKER
from dsjob.errors import CheckpointError, CorruptCheckpointError
from dsjob.ranks.seeding import seed_rng

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.booleans()


@given(st.recursive(SCALARS, lambda s: st.lists(s) | st.tuples(s, s) | st.dictionaries(KEYS, s), max_leaves=20))
def test_values_come_back_with_their_types(value: Any) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    back = decode(json.loads(text))
    assert back == value
    assert repr(back) == repr(value)


def test_nan_and_numpy_scalars_are_kept() -> None:
    assert np.isnan(decode(encode(float("nan"))))
    assert encode({"a": np.float64(0.5), "b": np.int64(3)}) == {"a": 0.5, "b": 3}


@pytest.mark.parametrize("value", [object(), torch.zeros(1), lambda: None, Ellipsis, np.array([object()])])
def test_what_json_cannot_keep_is_refused_by_name(value: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"cannot save client_state\.a\[1\]: (checkpoints cannot store|its elements are object)"
    ):
        encode({"a": [0, value]}, "client_state")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_small_tensors_come_back_where_they_are_asked_for(dtype: torch.dtype) -> None:
    for tensor in (torch.tensor(0.1).to(dtype), torch.rand(2, 3).to(dtype), torch.tensor([float("inf")]).to(dtype)):
        text = json.dumps(encode({"betas": (0.9, tensor)}, tensors=True), allow_nan=False)
        back = decode(json.loads(text))["betas"][1]
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("value", [torch.zeros(1025), torch.zeros(0), torch.tensor(1j)])
def test_other_tensors_are_refused(value: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"cannot save optimizer\.x\[0\]: .* of type Tensor"):
        encode([value], "optimizer.x", tensors=True)


def test_every_generator_continues_where_it_was() -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.normal(), torch.randn(2).tolist(), random.gauss(0, 1)

    seed_rng(3)
    draw()
    state = json.loads(json.dumps(capture_rng(torch.device("cpu"))))
    expected = [draw() for _ in range(3)]
    restore_rng(state, torch.device("cpu"))
    assert [draw() for _ in range(3)] == expected


def test_a_named_state_of_another_kind_of_generator_is_left_out() -> None:
    """As where a run on a GPU goes on without one."""
    TRACKER.reset()
    TRACKER.add("masks", 7)
    own = TRACKER.get_states()["masks"]
    state = capture_rng(torch.device("cpu"))
    state["tracked"] |= {"other": "AAAAAAAAAAAAAAAAAAAAAA==", "same": state["tracked"]["masks"]}
    state["tracked"]["masks"] = state["tracked"]["other"]
    restore_rng(state, torch.device("cpu"))
    found = TRACKER.get_states()
    assert sorted(found) == ["masks", "same"]
    assert torch.equal(found["masks"], own)
    with TRACKER.fork("same"):
        torch.rand(1)
    TRACKER.reset()


@pytest.mark.parametrize(
    ("name", "values"), [("state", {"client_state": {"a": {"$float": "abc"}}}), ("job", {"bf16": ["enabled"]})]
)
def test_values_of_no_form_are_not_converted(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    make_engine(0).save_checkpoint(str(tmp_path / "own"), tag="one")
    (folder,) = (tmp_path / "own").glob("one-a*")
    path, manifest = folder / f"{name}.json", json.loads((folder / "manifest.json").read_text())
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **values}))
    manifest[f"{name}_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    commit_manifest(tmp_path / "own", folder, "one", 0)
    with pytest.raises(CorruptCheckpointError, match="cannot restore the state in"):
        convert_to_deepspeed(str(tmp_path / "own"), str(tmp_path / "out"), stage=1, world_size=2)
