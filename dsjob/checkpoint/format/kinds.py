"""Encodes Python and NumPy values that JSON cannot represent. Each kind of value has a tag and a plain form.

Decoding only builds the types listed here. It never imports or calls anything that a checkpoint names, so an untrusted
checkpoint can only produce harmless values. Imports no torch.
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

MOST_BYTES = 1 << 20  # the limit for one array, or one bytes object, stored inline in JSON


class Kind(NamedTuple):
    """How values of one type are encoded.

    `encode` returns JSON values; nested values in it may still need encoding. `decode` reverses it, after nested values
    were decoded.
    """

    type: type | tuple[type, ...]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def pack(data: bytes) -> str:
    """Base64. Raises ValueError for more than MOST_BYTES."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data):,} bytes; the limit is {MOST_BYTES:,}")
    return base64.b64encode(data).decode("ascii")


def unpack(text: str) -> bytes:
    """Reverses `pack`."""
    return base64.b64decode(text, validate=True)


def describe_array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The dtype and shape of an array of numbers, strings or times. Raises ValueError for any other dtype."""
    # Object arrays are excluded: they could only be stored with pickle.
    if array.dtype.kind not in "biufcSUmM":
        raise ValueError(f"its elements are {array.dtype}")
    return {"dtype": array.dtype.newbyteorder("<").str, "shape": list(array.shape)}


def array_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """The elements in row-major order, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()


def make_array(described: dict[str, Any], data: bytearray | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Builds the array that `describe_array` described. It shares the memory of `data`.

    Raises ValueError or TypeError if `described` and `data` do not fit together.
    """
    # From an untrusted text, but this only builds a type. The kinds below exclude Python objects.
    dtype = np.dtype(str(described["dtype"]))
    if dtype.kind not in "biufcSUmM":
        raise ValueError(f"arrays of {dtype} are not supported")
    return np.frombuffer(data, dtype=dtype).reshape([int(size) for size in described["shape"]])


def _sorted(values: Any) -> list[Any]:
    """The members of a set, in the same order on every rank. (Hashes of strings differ between processes.)"""
    return sorted(values, key=lambda value: (type(value).__name__, repr(value)[:200]))


def _scalar(value: Any) -> dict[str, Any]:
    return {**describe_array(np.asarray(value)), "data": pack(array_bytes(np.asarray(value)))}


# Subclasses come before their bases, because find_kind takes the first match: a datetime is also a date.
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
    """The tag for this value's type, or None if the type is not supported."""
    return next((tag for tag, kind in KINDS.items() if isinstance(value, kind.type)), None)
