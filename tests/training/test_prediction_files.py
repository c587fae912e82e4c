"""Values of predictions as JSON has them."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from dsjob.errors import ContractError
from dsjob.training.prediction_files import Part, _to_lines, merge


def test_values_inside_lists_become_json() -> None:
    rows = {
        "boxes": [torch.tensor([[1.5, float("nan")]]), torch.zeros(0, 2)],
        "found": [{"name": "cat", "score": np.float32(0.5)}, {"name": "dog", "score": float("inf")}],
        "words": [("a", None), (True, 2)],
    }
    lines = [json.loads("{" + line) for line in _to_lines(rows, 2).decode().splitlines()]
    assert lines[0] == {"boxes": [[1.5, None]], "found": {"name": "cat", "score": 0.5}, "words": ["a", None]}
    assert lines[1] == {"boxes": [], "found": {"name": "dog", "score": None}, "words": [True, 2]}


def test_a_value_that_json_does_not_have_is_named() -> None:
    with pytest.raises(ContractError, match=r"predict\.outputs\.raw: bytes cannot be written as JSON"):
        _to_lines({"raw": [b"x"]}, 1)


def test_more_parts_are_merged_than_a_process_may_open(tmp_path: Path) -> None:
    written = {}
    for rank in range(60):
        with Part(str(tmp_path), rank, "jsonl") as part:
            for turn in range(2):
                part.add({"value": [turn * 60 + rank]}, 1)
        written[rank] = part.written
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        assert merge(str(tmp_path / "all.jsonl"), str(tmp_path), written, "jsonl") == 120
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert rows == [{"index": index, "value": index} for index in range(120)]
