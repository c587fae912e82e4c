"""Reads the headers of safetensors files that other programs wrote, and checks them strictly. Imports no torch."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from dsjob.checkpoint.format import zero_to_fp32 as layout

MAX_HEADER = 100_000_000  # bytes; the limit of safetensors itself


class Place(NamedTuple):
    """Where a tensor lies in a file: `start` (from the beginning of the file) and `length`, in bytes."""

    dtype: str
    shape: list[int]
    start: int
    length: int


def read_header(root: layout.Folder, name: str) -> tuple[int, dict[str, Place]]:
    """The size of a file in bytes, and its tensors by name.

    The format requires that tensors fill the file without gaps. Raises Damaged if the file is missing or is not a
    valid safetensors file.
    """
    path = f"{root.root}/{name}"
    try:
        with root.open_file(name) as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = bytearray(8)
            # If the file has less than 8 bytes, `size` fails the check below.
            length = int.from_bytes(start, "little") if layout.read_exactly(file, memoryview(start)) else size
            if length > min(MAX_HEADER, size - 8):
                raise ValueError(f"its header claims to have {length} bytes")
            text = bytearray(length)
            if not layout.read_exactly(file, memoryview(text)):
                raise ValueError("its header is truncated")
        return size, _find_places(parse_header(text), 8 + length, size)
    except FileNotFoundError:
        raise layout.Damaged(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise layout.Damaged(f"{path} is not a valid safetensors file: {error}") from None


def parse_header(text: bytes | bytearray) -> dict[str, Any]:
    """The tensor entries of a header, without its metadata. Raises ValueError or RecursionError if it is not a JSON
    object."""
    header = json.loads(text.decode(), object_pairs_hook=layout.unique)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _find_places(header: dict[str, Any], start: int, size: int) -> dict[str, Place]:
    places = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise ValueError(f"{name[:200]!r} lacks dtype, shape or data_offsets")
        shape, span = layout.parse_counts(entry["shape"]), layout.parse_counts(entry["data_offsets"])
        if not isinstance(entry["dtype"], str) or len(span) != 2 or span[0] > span[1]:
            raise ValueError(f"{name[:200]!r}: dtype must be a string, and data_offsets two increasing numbers")
        places[name] = Place(entry["dtype"], list(shape), start + span[0], span[1] - span[0])
    # Gaps or overlaps could hide data, or make two readers see different tensors.
    end = start
    # An empty tensor begins where the next one does, so the shorter one comes first.
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].length)):
        if place.start != end:
            raise ValueError(f"{name[:200]!r} does not begin where the previous tensor ends")
        end += place.length
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, but it has {size} bytes")
    return places
