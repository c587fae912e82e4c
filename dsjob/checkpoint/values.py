"""Plain values in JSON: what state dicts hold beside tensors, so that nothing is ever pickled.

Tuples, infinities, and keys that are not strings have no form of their own in JSON: they are tagged. Anything else
that JSON lacks is refused when it is saved, not when it is missed.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from dsjob.errors import CheckpointError


def encode(value: Any, where: str = "value") -> Any:
    """`value` as JSON values. Raises CheckpointError for what cannot be kept, naming it by `where`."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return encode(value.item(), where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"$items": [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]}
    raise CheckpointError(
        f"{where} is {type(value).__name__}, which a checkpoint cannot keep",
        hint="state is kept as tensors and JSON values: numbers, text, lists, tuples, dicts",
    )


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(item) for item in value["$tuple"])
    if "$items" in value:
        return {decode(key): decode(item) for key, item in value["$items"]}
    return {key: decode(item) for key, item in value.items()}


def encode_json(value: Any) -> bytes:
    """`value` as compact JSON. Raises ValueError for nan and inf."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def encode_file(value: Any, place: str, limit: int) -> bytes:
    """The same for a file at `place` of which readers take `limit` bytes. Raises CheckpointError where it has more."""
    text = encode_json(value)
    if len(text) > limit:
        raise CheckpointError(
            f"{place} would have {len(text):,} bytes, and what reads checkpoints takes {limit:,} at most",
            hint="keep less beside the tensors: client_state, what callbacks and metrics remember, metrics by name",
        )
    return text
