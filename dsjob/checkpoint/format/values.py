"""Stores the plain values of state dicts (everything but tensors) as JSON, so that nothing is ever pickled.

JSON cannot represent tuples, infinities, keys that are not strings, or the types in `kinds`, so these are tagged.
Tensors are tagged too, if the caller asks for it: small ones (such as the learning rate of a compiled optimizer) as
numbers, others by the name of a tensor stored beside the values. Any other type is an error at save time, rather than
a loss that is noticed on resume. Does not import torch at the top, because tools that copy checkpoints import this.
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

CLIENT = "client"  # the role of a tensor from a program's client_state
MOST_ELEMENTS = 1024  # the largest tensor stored inline: enough for a learning rate, or one value per layer


def encode(value: Any, where: str = "value", *, tensors: bool = False, stored: dict[str, Any] | None = None) -> Any:
    """Encodes `value` as JSON values.

    tensors: also encode small tensors. stored: an output; tensors and arrays too large for JSON are put here, under the
    names that they must be saved by. where: how error messages name the value. Raises CheckpointError for a value that
    cannot be stored.
    """
    return _Encoder(tensors, stored).encode(value, where)


class _Encoder:
    """The arguments of `encode`, for its recursion."""

    def __init__(self, tensors: bool, stored: dict[str, Any] | None) -> None:
        self._tensors, self._stored = tensors, stored

    def encode(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if isinstance(value, (np.integer, np.floating, np.bool_)):
            return self.encode(value.item(), where)
        # A subclass of int, such as an IntEnum, becomes a plain int.
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
            raise CheckpointError(f"cannot save {where}: {error}") from error
        if kept is not None:
            return kept
        raise CheckpointError(
            f"cannot save {where}: checkpoints cannot store values of type {type(value).__name__}",
            hint="use numbers, strings, lists, tuples, dicts, sets, bytes, dates or arrays"
            + (f", or tensors of 1 to {MOST_ELEMENTS:,} real numbers" if self._tensors else ""),
        )

    def _encode_dict(self, value: dict[Any, Any], where: str) -> Any:
        # A plain JSON object, unless a key is no string or could be mistaken for a tag.
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = ((self.encode(key, where), self.encode(item, f"{where}.{key}")) for key, item in value.items())
        return {"$items": [list(pair) for pair in pairs]}

    def _encode_other(self, value: Any, where: str) -> dict[str, Any] | None:
        """Encodes a type that JSON lacks, with its tag. None if the type is not supported. Raises ValueError if the
        encoded value would be too large."""
        tag = find_kind(value)
        if tag is not None:
            return {tag: self.encode(KINDS[tag].encode(value), where)}
        if isinstance(value, np.ndarray):
            described, data = describe_array(value), array_bytes(value)
            # Without `stored`, there is no other place. `pack` then raises for an array that is too large.
            if len(data) <= MOST_BYTES or self._stored is None:
                return {"$array": {**described, "data": pack(data)}}
            return {"$array": {**described, "stored": self._store(np.frombuffer(bytearray(data), np.uint8))}}
        kept = _encode_tensor(value) if self._tensors else None
        if kept is not None:
            return {"$tensor": kept}
        return {"$stored": self._store(value)} if self._stored is not None and _is_tensor(value) else None

    def _store(self, value: Any) -> str:
        """Adds a tensor to those saved beside the values, and returns its name. Raises ValueError if the tensor cannot
        be saved."""
        import torch

        from dsjob.checkpoint.format.dtypes import NAMES

        assert self._stored is not None
        tensor = torch.as_tensor(value).detach()
        if tensor.dtype not in NAMES or not _is_whole(tensor):
            raise ValueError(
                f"it is a {type(value).__name__} of {tensor.dtype} on {tensor.device}; only dense, unsharded tensors"
                " can be saved"
            )
        name = f"client_state.{len(self._stored)}"
        self._stored[name] = tensor
        return name


def decode(value: Any, device: Any = "cpu", stored: Mapping[str, Any] | None = None) -> Any:
    """Reverses `encode`. Small tensors that were not on the CPU are put on `device`.

    stored: the tensors saved beside the values. Input that `encode` cannot have produced raises LookupError, TypeError,
    ValueError or OverflowError.
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
        # The array shares the stored tensor's memory, because the tensor may be filled from the shards only later.
        own = (stored or {})[kept["stored"]].numpy() if "stored" in kept else bytearray(unpack(kept["data"]))
        return make_array(kept, own)
    tag = next(iter(value), None)
    # Exactly one key: `encode` puts all other objects with keys that begin with $ under $items.
    if len(value) == 1 and tag in KINDS:
        return KINDS[tag].decode(decode(value[tag], device, stored))
    return {key: decode(item, device, stored) for key, item in value.items()}


def _is_tensor(value: object) -> bool:
    from torch import Tensor

    return isinstance(value, Tensor)


def _is_whole(tensor: Any) -> bool:
    """Whether this process holds all elements: the tensor is not sparse, on the meta device, or a DTensor."""
    import torch

    return tensor.layout == torch.strided and not tensor.is_meta and not hasattr(tensor, "placements")


def _encode_tensor(value: Any) -> dict[str, Any] | None:
    """Encodes a small tensor of real numbers, exactly (JSON's numbers are doubles). None for anything else."""
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
    """`value` as compact JSON, for the file `place`.

    Raises CheckpointError if it exceeds the limits that readers enforce: `limit` bytes, or a number of small values
    that would exhaust their memory (see is_dense). Otherwise dsjob would write a checkpoint that it cannot read.
    """
    text = encode_json(value)
    hint = "store less in client_state, in the state of callbacks and metrics, or in metrics by name"
    if len(text) > limit:
        what = f"{place} would have {len(text):,} bytes; the limit is {limit:,}"
        raise CheckpointError(what, hint=hint)
    if is_dense(text):
        what = f"{place} would hold too many small values for readers of checkpoints"
        raise CheckpointError(what, hint=f"{hint}; store long lists of numbers as arrays or tensors")
    return text
