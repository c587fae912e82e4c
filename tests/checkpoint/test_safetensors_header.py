"""The headers of other programs' safetensors files, with one reader for all that take such files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_checkpoint import floats, save
from safetensors.numpy import save_file

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.headers import MAX_HEADER, read_header
from dsjob.checkpoint.offline.compare import compare
from dsjob.checkpoint.other.plain_weights import find_weights
from dsjob.errors import CorruptCheckpointError

SPAN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NEXT = {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}


def write(folder: Path, header: Any, size: int = 12) -> Path:
    """A file of a header, as it is or as JSON, and `size` bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return folder / "model.safetensors"


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {"a": np.ones((3, 2), "<f4"), "b": np.zeros((), "<f2"), "empty": np.zeros((0, 4), "<i8")}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "np"})
    size, places = read_header(layout.Folder(str(tmp_path)), "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    assert size == len(data)
    assert {name: (place.dtype, place.shape) for name, place in places.items()} == {
        "a": ("F32", [3, 2]),
        "b": ("F16", []),
        "empty": ("I64", [0, 4]),
    }
    assert all(data[p.start : p.start + p.length] == tensors[name].tobytes() for name, p in places.items())


WRONG: dict[str, tuple[Any, str]] = {
    "twice": (b'{"a": %s, "a": %s}' % ((json.dumps(SPAN).encode(),) * 2), "it has a duplicate key"),
    "a key of an entry twice": (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [3]}}', "it has a duplicate key"),
    "no object": (b"[1]", "not a JSON object"),
    "no entry": ({"a": 3}, "lacks dtype"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [3]}}, "lacks dtype"),
    "negative": ({"a": {**SPAN, "shape": [-3]}}, "must be lists of non-negative integers"),
    "truth": ({"a": {**SPAN, "data_offsets": [False, 12]}}, "must be lists of non-negative integers"),
    "three offsets": ({"a": {**SPAN, "data_offsets": [0, 4, 12]}}, "data_offsets two increasing numbers"),
    "backwards": ({"a": {**SPAN, "data_offsets": [12, 0]}}, "data_offsets two increasing numbers"),
    "a dtype that is no text": ({"a": {**SPAN, "dtype": ["F32"]}}, "must be a string"),
    "an overlap": ({"a": SPAN, "b": {**NEXT, "data_offsets": [4, 12], "shape": [2]}}, "'b' does not begin where"),
    "a hole": ({"a": SPAN, "b": {**NEXT, "data_offsets": [9, 13]}}, "'b' does not begin where"),
    "beyond the end": ({"a": SPAN, "b": {**NEXT, "data_offsets": [8, 1 << 62]}}, "its tensors end at"),
    "bytes of no tensor": ({"a": SPAN}, "its tensors end at"),
    "not UTF-8": (b'{"\xff": 1}', "utf-8"),
    "deep": (b'{"a":' * 100_000, "recursion"),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_reader_refuses_what_the_format_does_not_allow(tmp_path: Path, name: str) -> None:
    header, told = WRONG[name]
    path = write(tmp_path, header)
    with pytest.raises(layout.Damaged, match=rf"model\.safetensors is not a valid safetensors file: .*{told}"):
        read_header(layout.Folder(str(tmp_path)), path.name)
    with pytest.raises(layout.Damaged, match="is not a valid safetensors file"):
        find_weights(str(path))
    save(tmp_path / "checkpoint", {"model.a": floats(2)})
    with pytest.raises(CorruptCheckpointError, match="is not a valid safetensors file"):
        compare(str(tmp_path / "checkpoint"), str(path))


@pytest.mark.parametrize("length", [0, 1, 1 << 20, MAX_HEADER + 1, (1 << 64) - 1])
def test_the_length_of_a_header_is_bounded_before_it_is_read(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "model.safetensors", []
    original: Callable[..., bool] = layout.read_exactly

    def watch(file: Any, view: memoryview) -> bool:
        asked.append(len(view))
        return original(file, view)

    monkeypatch.setattr(layout, "read_exactly", watch)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(MAX_HEADER * 2 if length == MAX_HEADER + 1 else 1000)
    with pytest.raises(layout.Damaged, match="is not a valid safetensors file"):
        read_header(layout.Folder(str(tmp_path)), path.name)
    assert max(asked) <= 8


def test_an_index_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a": SPAN, "b": NEXT})
    entry = b'"a": "model.safetensors"'
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"weight_map": {%s, %s}}' % (entry, entry))
    with pytest.raises(layout.Damaged, match="it has a duplicate key"):
        find_weights(str(tmp_path))
