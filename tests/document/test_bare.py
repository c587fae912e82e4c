"""A bare DeepSpeed config without its unknown keys."""

from __future__ import annotations

from dsjob.document.bare import _drop


def test_keys_are_left_out_of_objects_inside_lists() -> None:
    """If they stayed, `leave_unknown_out` would find them again in every round and never return."""
    config = {"rules": [{"b": 1, "c": 2}, 3], "d": {"e": 4}}
    assert _drop(config, {("rules", 0, "b"), ("d", "e")}) == {"rules": [{"c": 2}, 3], "d": {}}
    assert config["d"] == {"e": 4}
