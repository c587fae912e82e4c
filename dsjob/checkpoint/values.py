"""Plain values in JSON: what state dicts hold beside tensors, so that nothing is ever pickled.

Tuples, infinities, and keys that are not strings have no form of their own in JSON: they are tagged, and so are small
tensors, such as a rate that a compiled optimizer reads, where the caller asks for it. Anything else that JSON lacks is
refused when it is saved, not when it is missed. Imports no torch: what copies checkpoints reads this.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from dsjob.errors import CheckpointError

MOST_ELEMENTS = 1024  # of a tensor among plain values: a rate, or one of each layer


def encode(value: Any, where: str = "value", *, tensors: bool = False) -> Any:
    """`value` as JSON values, with `tensors` small ones too.

    Raises CheckpointError for what cannot be kept, naming it by `where`.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return encode(value.item(), where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{i}]", tensors=tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]", tensors=tensors) for i, item in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}", tensors=tensors) for key, item in value.items()}
        pairs = ((encode(key, where), encode(item, f"{where}.{key}", tensors=tensors)) for key, item in value.items())
        return {"$items": [list(pair) for pair in pairs]}
    kept = _encode_tensor(value) if tensors else None
    if kept is not None:
        return {"$tensor": kept}
    raise CheckpointError(
        f"{where} is {type(value).__name__}, which a checkpoint cannot keep",
        hint="numbers, text, lists, tuples and dicts are kept"
        + (f", and tensors of 1 to {MOST_ELEMENTS:,} real numbers" if tensors else ""),
    )


def decode(value: Any, device: Any = "cpu") -> Any:
    """The value that `encode` was given; tensors that were not on the CPU on `device`."""
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(item, device) for item in value["$tuple"])
    if "$items" in value:
        return {decode(key): decode(item, device) for key, item in value["$items"]}
    if "$tensor" in value:
        return _decode_tensor(value["$tensor"], device)
    return {key: decode(item, device) for key, item in value.items()}


def _encode_tensor(value: Any) -> dict[str, Any] | None:
    """A small tensor of real numbers, which JSON's hold exactly; None of anything else."""
    from torch import Tensor

    from dsjob.checkpoint.dtypes import NAMES

    if not isinstance(value, Tensor) or value.dtype not in NAMES or value.is_complex():
        return None
    if not 0 < value.numel() <= MOST_ELEMENTS:
        return None
    numbers = encode((value.detach().double() if value.is_floating_point() else value).tolist())
    return {"dtype": NAMES[value.dtype], "device": value.device.type, "values": numbers}


def _decode_tensor(kept: dict[str, Any], device: Any) -> Any:
    import torch

    from dsjob.checkpoint.dtypes import DTYPES

    place = "cpu" if kept["device"] == "cpu" else device
    return torch.tensor(decode(kept["values"]), dtype=DTYPES[kept["dtype"]], device=place)


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
