"""Compares the tensors of two checkpoints, or of a checkpoint and safetensors files. Streams them; imports no torch."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.headers import Place, read_header
from dsjob.checkpoint.format.rounding import widen
from dsjob.checkpoint.offline.verify import Progress
from dsjob.checkpoint.root.source import locate, open_root, renamed
from dsjob.errors import CorruptCheckpointError, UsageError

Array = npt.NDArray[Any]
PLAIN = {"F64": "<f8", "C64": "<c8", "BOOL": "?", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
PLAIN.update({"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"})


@dataclass(frozen=True)
class Side:
    """One side of the comparison."""

    root: layout.Folder
    checkpoint: layout.Checkpoint
    weights_only: bool

    def names(self, weights_only: bool) -> dict[str, str]:
        """Maps the names to compare by to names in the manifest. Weights are compared by the model's own names."""
        found = layout.weights(self.checkpoint)
        if not weights_only:
            tensors = self.checkpoint.tensors.items()
            found.update({name: name for name, tensor in tensors if tensor.role not in layout.ROLES})
        return found


@dataclass(frozen=True)
class Difference:
    """The result for one tensor. `kind`: `same` (all bytes are equal), or what differs.

    `a`, `b`: dtype and shape on each side. `elements`: how many of the `size` elements differ. `max_abs`: the greatest
    |a - b|. `max_rel`: the greatest |a - b| / max(|a|, |b|). Both are infinite if an element is nan or infinite on one
    side only.
    """

    name: str
    kind: Literal["same", "values", "dtype", "shape", "only in A", "only in B"]
    a: str = ""
    b: str = ""
    size: int = 0
    elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


def compare(
    a: str, b: str, *, tags: tuple[str | None, str | None] = (None, None), progress: Progress | None = None
) -> list[Difference]:
    """Compares all tensors of both sides, sorted by name; only the weights if one side is safetensors files.

    a, b: any source of `convert`, a file `*.safetensors`, or a folder of converted weights. Memory use is a few blocks
    of 8 MiB. Raises NoCheckpointError, CorruptCheckpointError, StorageError, UsageError.
    """
    with renamed(f"compare {a} with {b}"):
        sides = [_open_side(a, tags[0]), _open_side(b, tags[1])]
        weights_only = any(side.weights_only for side in sides)
        ours, theirs = (side.names(weights_only) for side in sides)
        readers = [layout.Shards(side.root, side.checkpoint) for side in sides]
        tensors = {name: sides[0].checkpoint.tensors[place] for name, place in ours.items()}
        total, done = sum(_count(tensor) for name, tensor in tensors.items() if name in theirs), 0
        found = []
        try:
            for name in sorted({*ours, *theirs}):
                if name not in ours or name not in theirs:
                    found.append(
                        _describe_alone(name, sides[0 if name in ours else 1], ours.get(name), theirs.get(name))
                    )
                    continue
                found.append(_compare_tensor(name, readers, (ours[name], theirs[name])))
                done += _count(tensors[name])
                if progress:
                    progress(done, total)
        finally:
            for reader in readers:
                reader.close()
    return found


def _count(tensor: layout.Tensor) -> int:
    return functools.reduce(lambda x, y: x * y, tensor.shape, 1)


def _describe(tensor: layout.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _describe_alone(name: str, side: Side, first: str | None, second: str | None) -> Difference:
    tensor = side.checkpoint.tensors[first or second or ""]
    if first is not None:
        return Difference(name, "only in A", a=_describe(tensor), size=_count(tensor))
    return Difference(name, "only in B", b=_describe(tensor), size=_count(tensor))


def _compare_tensor(name: str, readers: list[layout.Shards], places: tuple[str, str]) -> Difference:
    a, b = (reader.checkpoint.tensors[place] for reader, place in zip(readers, places, strict=True))
    if a.shape != b.shape:
        return Difference(name, "shape", _describe(a), _describe(b), _count(a))
    elements, max_abs, max_rel, same = 0, 0.0, 0.0, a.dtype == b.dtype
    streams = [reader.stream(place) for reader, place in zip(readers, places, strict=True)]
    # Blocks of both sides have equally many elements, also if their dtypes differ.
    for block, other in zip(*streams, strict=True):
        if a.dtype == b.dtype and block == other:  # the common case: no arithmetic
            continue
        same = False
        count, difference, relative = _measure(_values(a.dtype, block), _values(b.dtype, other))
        elements, max_abs, max_rel = elements + count, max(max_abs, difference), max(max_rel, relative)
    kind: Literal["same", "values", "dtype"] = "same" if same else "dtype" if a.dtype != b.dtype else "values"
    return Difference(name, kind, _describe(a), _describe(b), _count(a), elements, max_abs, max_rel)


def _measure(a: Array, b: Array) -> tuple[int, float, float]:
    """The number of unequal elements (nan equals nan), the greatest absolute and the greatest relative difference."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        # x != x holds only for nan.
        other = (a != b) & ~((a != a) & (b != b))
        count = int(np.count_nonzero(other))
        if not count:
            return 0, 0.0, 0.0
        first, second = a[other].astype(wide), b[other].astype(wide)
        difference = np.abs(first - second)
        relative = difference / np.maximum(np.abs(first), np.abs(second))
    difference[np.isnan(difference)] = np.inf
    relative[np.isnan(relative)] = np.inf
    if not difference.any():  # large integers that are the same when rounded to float64
        difference[0] = 1.0
    return count, float(difference.max()), float(relative.max())


def _values(dtype: str, block: memoryview) -> Array:
    if dtype in PLAIN:
        return np.frombuffer(block, PLAIN[dtype])
    if dtype in ("F32", "F16", "BF16"):
        return widen(dtype, block)
    codes = np.frombuffer(block, "u1")
    if dtype == "F8_E5M2":  # F8_E5M2 is the upper half of F16
        return widen("F16", (codes.astype("<u2") << 8).view("u1").data)
    values: Array = _eight_bits()[codes]
    return values


@functools.cache
def _eight_bits() -> Array:
    """All values of F8_E4M3: a sign bit, 4 bits of exponent with bias 7, 3 of mantissa. It has no infinities; all ones
    are NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    plus = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    plus[127] = np.nan
    both: Array = np.concatenate([plus, -plus])
    return both


class _Files(layout.Folder):
    """A folder of safetensors files outside a checkpoint, as a Folder whose one step is `.`."""

    def __init__(self, url: str) -> None:
        self.place = open_root(url)
        self.root = self.place.root

    def open_file(self, name: str) -> io.RawIOBase:
        return self.place.open_file(name.removeprefix("./"))


def _open_side(url: str, tag: str | None) -> Side:
    """Opens a checkpoint, or safetensors files as if they were a checkpoint saved by one rank."""
    names = {url.rstrip("/").rpartition("/")[2]} if url.endswith(".safetensors") else set(open_root(url).names(""))
    files = sorted(name for name in names if layout.OUTPUT.fullmatch(name) and name.endswith(".safetensors"))
    if url.endswith(".safetensors"):
        files, url = list(names), url.rpartition("/")[0] or "."
    elif "commits" in names or "checkpoints" in names:
        files = []
    if not files:
        root, record = locate(url, tag)
        return Side(root, layout.read_checkpoint(root, record), weights_only=False)
    if tag:
        raise UsageError(f"{url} contains safetensors files, which have no tags", hint="omit its --tag")
    root = _Files(url)
    sizes, tensors = {}, {}
    for file in files:
        sizes[file], places = read_header(root, file)
        for name, place in places.items():
            if name in tensors:
                raise CorruptCheckpointError(f"{root.root}: {name[:200]!r} is in two files")
            try:
                tensors[name] = _parse(file, place, sizes)
            except ValueError as error:
                raise CorruptCheckpointError(f"{root.root}/{file}: {name[:200]!r}: {error}") from None
    return Side(root, layout.Checkpoint(url, 0, ".", sizes, tensors, {}, {}), weights_only=True)


def _parse(file: str, place: Place, sizes: dict[str, int]) -> layout.Tensor:
    whole = {"offsets": [0] * len(place.shape), "sizes": place.shape}
    chunk = {"file": file, "start": place.start, "length": place.length, **whole}
    entry = {"role": "parameter", "dtype": place.dtype, "shape": place.shape, "chunks": [chunk]}
    return layout.parse_tensor(entry, sizes, layout.Budget())
