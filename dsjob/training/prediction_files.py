"""The files of predictions: each rank writes a part, and rank 0 merges the parts in the order of the data.

A part is a sequence of frames, one for each batch: the number of its bytes (uint64, little-endian), then the bytes. The
ranks take turns through the batches, so rank 0 takes one frame of each part in turn. Neither side holds more than one
batch of each part in memory.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.dtypes import NAMES
from dsjob.checkpoint.root.source import open_root
from dsjob.errors import ContractError

Rows = Mapping[str, Any]  # by name: a tensor [samples, ...], or a list with one JSON value per sample
Column = tuple[str, tuple[int, ...]]
_FRAME = struct.Struct("<Q")
_BLOCKS = 256 << 20  # bytes that rank 0 reads ahead, over all parts
_SPLIT = "predict.outputs.{}: {} in one batch, but {} in another; safetensors needs equal ones"


@dataclass
class Written:
    """What a rank has written. columns: by name, the safetensors dtype and the shape of a sample. padded: the names of
    columns of ids whose length differs between batches, each with the id that pads them; their shape is that of the
    longest batch."""

    samples: int = 0
    columns: dict[str, Column] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)


class Part(AbstractContextManager["Part"]):
    """Writes one rank's part into a folder. A context manager."""

    def __init__(self, folder: str, rank: int, form: str) -> None:
        self.written = Written()
        self._folder, self._rank, self._form = folder, rank, form
        self._stack, self._files = ExitStack(), dict[str, BinaryIO]()

    def add(self, rows: Rows, samples: int, padded: Mapping[str, int] | None = None) -> None:
        """Adds a batch. padded: see `Written`. Raises ContractError for values that the format cannot hold."""
        self.written.samples += samples
        if self._form == "jsonl":
            self._write("lines", _to_lines(rows, samples))
            return
        self.written.padded |= padded or {}
        for number, (name, value) in enumerate(rows.items()):
            _join_column(self.written, name, _describe_column(name, value), self.written.padded)
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            # The length of a padded row follows from the number of samples.
            self._write(str(number), _FRAME.pack(samples) + bytes(data) if name in self.written.padded else data)

    def _write(self, column: str, data: bytes | memoryview) -> None:
        if column not in self._files:
            place = storage.join(self._folder, _name_part(self._rank, column))
            self._files[column] = self._stack.enter_context(storage.open_write(place))
        self._files[column].write(_FRAME.pack(len(data)))
        self._files[column].write(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _name_part(rank: int, column: str) -> str:
    return f"r{rank:05d}-{column}"


def _describe_column(name: str, value: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(value, Tensor) or value.dtype not in NAMES:
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise ContractError(f"predict.outputs.{name}: {kind} does not fit safetensors", hint="predict.format=jsonl")
    return NAMES[value.dtype], tuple(value.shape[1:])


def _to_lines(rows: Rows, samples: int) -> bytes:
    """One line per sample, without its beginning, `{"index": N, `."""
    columns = {name: _to_values(name, value) for name, value in rows.items()}
    lines = (json.dumps({name: values[row] for name, values in columns.items()})[1:] for row in range(samples))
    return "".join(f"{line}\n" for line in lines).encode()


def _to_values(name: str, value: Any) -> list[Any]:
    """The values of samples as JSON has them. Raises ContractError."""
    if not isinstance(value, Tensor):
        return [_to_json(name, item) for item in value]
    host = value.detach().cpu()
    values: list[Any] = host.tolist()
    plain = not host.is_complex() and (not host.is_floating_point() or bool(host.isfinite().all()))
    return values if plain else _to_json(name, values)


def _to_json(name: str, value: Any) -> Any:
    """`value` with lists for tensors and tuples, and None for every nan and inf, which JSON does not have."""
    if hasattr(value, "tolist"):  # of torch or NumPy
        return _to_json(name, value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _to_json(name, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(name, item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    message = f"predict.outputs.{name}: {type(value).__name__} cannot be written as JSON"
    raise ContractError(message, hint="choose tensors, numbers or text")


def merge(url: str, folder: str, parts: Mapping[int, Written], form: str) -> int:
    """Merges the parts in `folder` into the file `url`. Returns the number of samples.

    parts: by rank, in the order in which the ranks take turns. Raises ContractError, StorageError.
    """
    written = {rank: part for rank, part in parts.items() if part.samples}
    samples = sum(part.samples for part in written.values())
    with storage.open_write(url) as file:
        if form == "jsonl":
            index = 0
            for data in _read_in_turn(folder, list(written), "lines"):
                lines = data.splitlines(keepends=True)
                file.write(b"".join(b'{"index": %d, %s' % (index + row, line) for row, line in enumerate(lines)))
                index += len(lines)
            return samples
        columns = _join_columns(list(written.values()))
        file.write(_make_header(columns, samples))
        padded = next(iter(written.values())).padded if written else {}
        for number, (name, column) in enumerate(columns.items()):
            for data in _read_in_turn(folder, list(written), str(number)):
                file.write(_pad_rows(data, column, padded[name]) if name in padded else data)
    return samples


def _join_columns(parts: Sequence[Written]) -> dict[str, Column]:
    joined = Written()
    for part in parts:
        for name, column in part.columns.items():
            _join_column(joined, name, column, part.padded)
    return joined.columns


def _join_column(written: Written, name: str, column: Column, padded: Mapping[str, int]) -> None:
    """Adds the column of a batch or of a part to `written`. Raises ContractError if it does not fit the others."""
    known = written.columns.setdefault(name, column)
    if name in padded and column[0] == known[0]:
        written.columns[name] = (column[0], max(column[1], known[1]))
    elif known != column:
        raise ContractError(_SPLIT.format(name, *(f"{kind}{list(shape)}" for kind, shape in (column, known))))


def _pad_rows(frame: bytes, column: Column, pad: int) -> bytes:
    """The rows of a batch, padded to the length of the column."""
    dtype, (longest,) = column
    width = layout.WIDTH[dtype]
    (samples,) = _FRAME.unpack(frame[: _FRAME.size])
    length = (len(frame) - _FRAME.size) // samples
    end = pad.to_bytes(width, "little", signed=True) * (longest - length // width)
    starts = (_FRAME.size + row * length for row in range(samples))
    return b"".join(frame[start : start + length] + end for start in starts)


def _make_header(columns: Mapping[str, Column], samples: int) -> bytes:
    header, start = {}, 0
    for name, (dtype, shape) in columns.items():
        length = samples * layout.WIDTH[dtype]
        for size in shape:
            length *= size
        header[name] = {"dtype": dtype, "shape": [samples, *shape], "data_offsets": [start, start + length]}
        start += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_in_turn(folder: str, ranks: Sequence[int], column: str) -> Iterator[bytes]:
    """The bytes of all batches in the order of the data."""
    block = max(1 << 16, min(4 << 20, _BLOCKS // max(1, len(ranks))))
    root = open_root(folder)
    parts = [_read_frames(root, _name_part(rank, column), block) for rank in ranks]
    for row in zip_longest(*parts):
        yield from (data for data in row if data is not None)


def _read_frames(root: layout.Folder, name: str, block: int) -> Iterator[bytes]:
    """The frames of a part. Its file is open only while a block is read: there can be more parts than a process may
    open."""
    held, offset = io.BytesIO(), 0

    def take(size: int) -> bytes:
        nonlocal held, offset
        data = held.read(size)
        if len(data) == size:
            return data
        with io.BufferedReader(root.open_file(name), block) as file:
            file.seek(offset)
            held = io.BytesIO(file.read(max(block, size - len(data))))
        offset += len(held.getbuffer())
        return data + held.read(size - len(data))

    while head := take(_FRAME.size):
        yield take(*_FRAME.unpack(head))
