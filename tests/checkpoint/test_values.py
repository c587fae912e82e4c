"""State in JSON and back: exactly, or not at all."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsjob.activation.rng import TRACKER
from dsjob.checkpoint.rng import capture_rng, restore_rng
from dsjob.checkpoint.values import decode, encode
from dsjob.errors import CheckpointError
from dsjob.seeding import seed_rng

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


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.zeros(1), lambda: None])
def test_what_json_cannot_keep_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"client_state\.a\[1\] is"):
        encode({"a": [0, value]}, "client_state")


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
