"""The headers of safetensors files that other programs wrote, read strictly. Imports no torch."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from dsjob.checkpoint.format import zero_to_fp32 as layout

MAX_HEADER = 100_000_000  # bytes: what safetensors allows


class Place(NamedTuple):
    """A tensor of a file; `start` of its `length` bytes is counted from the file's beginning."""

    dtype: str
    shape: list[int]
    start: int
    length: int


def read_header(root: layout.Folder, name: str) -> tuple[int, dict[str, Place]]:
    """A file's size in bytes and its tensors by name, which fill it without gaps as the format has it.

    Raises Damaged where there is no such file, or it is none of safetensors.
    """
    path = f"{root.root}/{name}"
    try:
        with root.open_file(name) as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = bytearray(8)
            length = int.from_bytes(start, "little") if layout.read_exactly(file, memoryview(start)) else size
            if length > min(MAX_HEADER, size - 8):
                raise ValueError(f"its header would have {length} bytes")
            text = bytearray(length)
            if not layout.read_exactly(file, memoryview(text)):
                raise ValueError("its header is cut short")
        return size, _find_places(parse_header(text), 8 + length, size)
    except FileNotFoundError:
        raise layout.Damaged(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise layout.Damaged(f"{path} is no safetensors file: {error}") from None


def parse_header(text: bytes | bytearray) -> dict[str, Any]:
    """What the bytes of a header say of tensors; ValueError or RecursionError where they are no object of JSON."""
    header = json.loads(text.decode(), object_pairs_hook=layout.unique)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    return header


def _find_places(header: dict[str, Any], start: int, size: int) -> dict[str, Place]:
    places = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise ValueError(f"{name[:200]!r} has not dtype, shape and data_offsets")
        shape, span = layout.parse_counts(entry["shape"]), layout.parse_counts(entry["data_offsets"])
        if not isinstance(entry["dtype"], str) or len(span) != 2 or span[0] > span[1]:
            raise ValueError(f"{name[:200]!r} has a dtype that is no text, or no two data_offsets")
        places[name] = Place(entry["dtype"], list(shape), start + span[0], span[1] - span[0])
    end = start
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].length)):
        if place.start != end:
            raise ValueError(f"{name[:200]!r} does not begin where the tensor before it ends")
        end += place.length
    if end != size:
        raise ValueError(f"its tensors end at {end}, and it has {size} bytes")
    return places
