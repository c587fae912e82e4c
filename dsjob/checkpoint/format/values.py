"""Plain values in JSON: what state dicts hold beside tensors, so that nothing is ever pickled.

Tuples, infinities, keys that are not strings and the kinds of `kinds` have no form of their own in JSON: they are
tagged. So are tensors, where the caller asks for it: small ones, such as a rate that a compiled optimizer reads, as
numbers, others by the name of a tensor that is stored beside the values. Anything else is refused when it is saved, not
when it is missed. Imports no torch: what copies checkpoints reads this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsjob.checkpoint.format.kinds import (
    KINDS,
    MOST_BYTES,
    array_bytes,
    describe_array,
    find_kind,
    make_array,
    pack,
    unpack,
)
from dsjob.checkpoint.format.zero_to_fp32 import is_dense
from dsjob.errors import CheckpointError

CLIENT = "client"  # role of a tensor that belongs to the client_state of a program
MOST_ELEMENTS = 1024  # of a tensor among plain values: a rate, or one of each layer


def encode(value: Any, where: str = "value", *, tensors: bool = False, stored: dict[str, Any] | None = None) -> Any:
    """`value` as JSON values, with `tensors` small ones too.

    stored: takes those tensors and arrays of a client_state that are too large for JSON, under the names that they are
    to be saved by. Raises CheckpointError for what cannot be kept, naming it by `where`.
    """
    return _Encoder(tensors, stored).encode(value, where)


class _Encoder:
    """`encode` with what it was called with."""

    def __init__(self, tensors: bool, stored: dict[str, Any] | None) -> None:
        self._tensors, self._stored = tensors, stored

    def encode(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if isinstance(value, (np.integer, np.floating, np.bool_)):
            return self.encode(value.item(), where)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, tuple):
            return {"$tuple": [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, list):
            return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, dict):
            return self._encode_dict(value, where)
        try:
            kept = self._encode_other(value, where)
        except ValueError as error:
            raise CheckpointError(f"{where} cannot be kept: {error}") from error
        if kept is not None:
            return kept
        raise CheckpointError(
            f"{where} is {type(value).__name__}, which a checkpoint cannot keep",
            hint="numbers, text, lists, tuples, dicts, sets, bytes, dates and arrays are kept"
            + (f", and tensors of 1 to {MOST_ELEMENTS:,} real numbers" if self._tensors else ""),
        )

    def _encode_dict(self, value: dict[Any, Any], where: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = ((self.encode(key, where), self.encode(item, f"{where}.{key}")) for key, item in value.items())
        return {"$items": [list(pair) for pair in pairs]}

    def _encode_other(self, value: Any, where: str) -> dict[str, Any] | None:
        """What JSON has no form for, tagged. Raises ValueError where its form would be too large."""
        tag = find_kind(value)
        if tag is not None:
            return {tag: self.encode(KINDS[tag].encode(value), where)}
        if isinstance(value, np.ndarray):
            described, data = describe_array(value), array_bytes(value)
            if len(data) <= MOST_BYTES or self._stored is None:
                return {"$array": {**described, "data": pack(data)}}
            return {"$array": {**described, "stored": self._store(np.frombuffer(bytearray(data), np.uint8))}}
        kept = _encode_tensor(value) if self._tensors else None
        if kept is not None:
            return {"$tensor": kept}
        return {"$stored": self._store(value)} if self._stored is not None and _is_tensor(value) else None

    def _store(self, value: Any) -> str:
        """The name under which a tensor is saved beside the values. Raises ValueError for one that cannot be."""
        import torch

        from dsjob.checkpoint.format.dtypes import NAMES

        assert self._stored is not None
        tensor = torch.as_tensor(value).detach()
        if tensor.dtype not in NAMES or not _is_whole(tensor):
            raise ValueError(
                f"{type(value).__name__} of {tensor.dtype} on {tensor.device}: only whole, dense tensors are"
            )
        name = f"client_state.{len(self._stored)}"
        self._stored[name] = tensor
        return name


def decode(value: Any, device: Any = "cpu", stored: Mapping[str, Any] | None = None) -> Any:
    """The value that `encode` was given; small tensors that were not on the CPU on `device`.

    stored: the tensors that were saved beside it. What `encode` never gives raises LookupError, TypeError, ValueError
    or OverflowError.
    """
    if isinstance(value, list):
        return [decode(item, device, stored) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(item, device, stored) for item in value["$tuple"])
    if "$items" in value:
        return {decode(key): decode(item, device, stored) for key, item in value["$items"]}
    if "$tensor" in value:
        return _decode_tensor(value["$tensor"], device)
    if "$stored" in value:
        return (stored or {})[value["$stored"]]
    if "$array" in value:
        kept = value["$array"]
        # The tensor may be filled later: the array has its memory.
        own = (stored or {})[kept["stored"]].numpy() if "stored" in kept else bytearray(unpack(kept["data"]))
        return make_array(kept, own)
    tag = next(iter(value), None)
    if len(value) == 1 and tag in KINDS:
        return KINDS[tag].decode(decode(value[tag], device, stored))
    return {key: decode(item, device, stored) for key, item in value.items()}


def _is_tensor(value: object) -> bool:
    from torch import Tensor

    return isinstance(value, Tensor)


def _is_whole(tensor: Any) -> bool:
    """Whether all elements of a tensor are here: it is not sparse, without data, or a rank's part of one."""
    import torch

    return tensor.layout == torch.strided and not tensor.is_meta and not hasattr(tensor, "placements")


def _encode_tensor(value: Any) -> dict[str, Any] | None:
    """A small tensor of real numbers, which JSON's hold exactly; None of anything else."""
    from dsjob.checkpoint.format.dtypes import NAMES

    if not _is_tensor(value) or value.dtype not in NAMES or value.is_complex():
        return None
    if not 0 < value.numel() <= MOST_ELEMENTS or not _is_whole(value):
        return None
    numbers = encode((value.detach().double() if value.is_floating_point() else value).tolist())
    return {"dtype": NAMES[value.dtype], "device": value.device.type, "values": numbers}


def _decode_tensor(kept: dict[str, Any], device: Any) -> Any:
    import torch

    from dsjob.checkpoint.format.dtypes import DTYPES

    place = "cpu" if kept["device"] == "cpu" else device
    return torch.tensor(decode(kept["values"]), dtype=DTYPES[kept["dtype"]], device=place)


def encode_json(value: Any) -> bytes:
    """`value` as compact JSON. Raises ValueError for nan and inf."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def encode_file(value: Any, place: str, limit: int) -> bytes:
    """The same for a file at `place`.

    Raises CheckpointError where it has more than the `limit` bytes that readers take, or more small values than they
    have memory for.
    """
    text = encode_json(value)
    hint = "keep less beside the tensors: client_state, what callbacks and metrics remember, metrics by name"
    if len(text) > limit:
        what = f"{place} would have {len(text):,} bytes, and what reads checkpoints takes {limit:,} at most"
        raise CheckpointError(what, hint=hint)
    if is_dense(text):
        what = f"{place} would hold more small values than what reads checkpoints takes"
        raise CheckpointError(what, hint=f"{hint}; long lists of numbers as arrays or tensors")
    return text
