"""Values of Python and NumPy that programs keep in a checkpoint and JSON lacks: each kind has a tag and a plain form.

Nothing here imports or calls what a checkpoint names, so a hostile one makes harmless values. Imports no torch.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

MOST_BYTES = 1 << 20  # of an array, or of bytes, in JSON


class Kind(NamedTuple):
    """`encode` gives a form of which JSON lacks no part but nested values; `decode` takes it, its parts decoded."""

    type: type | tuple[type, ...]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def pack(data: bytes) -> str:
    """Base64. Raises ValueError for more than MOST_BYTES."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, more than {MOST_BYTES:,}")
    return base64.b64encode(data).decode("ascii")


def unpack(text: str) -> bytes:
    """The bytes that `pack` was given."""
    return base64.b64decode(text, validate=True)


def describe_array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The dtype and shape of an array of plain numbers, texts or times. Raises ValueError for other elements."""
    if array.dtype.kind not in "biufcSUmM":
        raise ValueError(f"its elements are {array.dtype}")
    return {"dtype": array.dtype.newbyteorder("<").str, "shape": list(array.shape)}


def array_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """The elements in row-major order, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()


def make_array(described: dict[str, Any], data: bytearray | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array of `describe_array` over the memory of `data`. Raises ValueError, TypeError for what fits no array."""
    dtype = np.dtype(str(described["dtype"]))
    if dtype.kind not in "biufcSUmM":
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(data, dtype=dtype).reshape([int(size) for size in described["shape"]])


def _sorted(values: Any) -> list[Any]:
    """Members of a set in an order that all ranks share."""
    return sorted(values, key=lambda value: (type(value).__name__, repr(value)[:200]))


def _scalar(value: Any) -> dict[str, Any]:
    return {**describe_array(np.asarray(value)), "data": pack(array_bytes(np.asarray(value)))}


# Subclasses before their bases: a datetime is a date.
KINDS: dict[str, Kind] = {
    "$bytes": Kind((bytes, bytearray), lambda value: pack(bytes(value)), unpack),
    "$frozenset": Kind(frozenset, _sorted, frozenset),
    "$set": Kind(set, _sorted, set),
    "$namespace": Kind(argparse.Namespace, vars, lambda values: argparse.Namespace(**values)),
    "$simple_namespace": Kind(SimpleNamespace, vars, lambda values: SimpleNamespace(**values)),
    "$datetime": Kind(datetime, datetime.isoformat, datetime.fromisoformat),
    "$date": Kind(date, date.isoformat, date.fromisoformat),
    "$time": Kind(time, time.isoformat, time.fromisoformat),
    "$timedelta": Kind(
        timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda v: timedelta(*v)
    ),
    "$complex": Kind(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "$path": Kind(PurePath, str, Path),
    "$scalar": Kind(np.generic, _scalar, lambda d: make_array(d, bytearray(unpack(d["data"]))).reshape(())[()]),
}


def find_kind(value: object) -> str | None:
    """The tag of a value's kind; None where it has none."""
    return next((tag for tag, kind in KINDS.items() if isinstance(value, kind.type)), None)
