"""Optimizer state on a local disk, stepped part by part. No strategy uses it yet: a document cannot ask for it.

Between steps, the large tensors of an optimizer's state are mappings of a scratch file, so a checkpoint, or a program,
reads and writes them like any other tensor. A step reads the state of one part of the parameters after another into
buffers, past the page cache. While a part is stepped, the next ones are read and earlier ones are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsjob.ops.disk import Buffer, Piece, ScratchFile, Transfer, round_up
from dsjob.optim.parts import step_in_parts
from dsjob.optim.shards import local

SMALL = 64 << 10  # bytes: a smaller tensor stays in memory, since a request would take longer than its bytes


class _Entry(NamedTuple):
    """A tensor of the state: the dict and key that hold it, its mapping, and its place in the file and in a buffer."""

    state: dict[str, Any]
    key: str
    mapped: Tensor
    piece: Piece

    def take_from(self, buffer: Buffer) -> None:
        """Makes the optimizer use the bytes in a buffer."""
        part = local(self.mapped)
        self.state[self.key] = _wrap(self.mapped, _view(buffer.bytes[self.piece.start :], part, part.dtype))


class _Loaded(NamedTuple):
    entries: list[_Entry]
    buffer: Buffer
    reading: Transfer


class StateOnDisk:
    """The state of one optimizer on this rank. buffers: that hold the state of one part each."""

    def __init__(self, file: ScratchFile, buffers: int) -> None:
        self._file = file
        self._free = [Buffer() for _ in range(max(buffers, 1))]
        self._writing: deque[tuple[Transfer, Buffer]] = deque()
        # Offsets and mappings by address. As long as a mapping is here, no other tensor can have its address.
        self._placed: dict[int, tuple[int, Tensor]] = {}

    def make(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor with the shape and placement of `like`: on the disk, unless it is small. Raises StorageError."""
        own = local(like)
        if own.numel() * dtype.itemsize < SMALL or own.device.type != "cpu":
            return torch.empty_like(like, dtype=dtype)
        offset = self._file.allocate(own.numel() * dtype.itemsize)
        part = _view(self._file.map(offset, own.numel() * dtype.itemsize), own, dtype)
        self._placed[part.data_ptr()] = offset, part
        return _wrap(like, part)

    @torch.no_grad()
    def step(
        self,
        optimizer: Optimizer,
        parts: Sequence[Sequence[Tensor]],
        step: Callable[[Optimizer], object],
        done: Callable[[int], None],
    ) -> None:
        """Like `step_in_parts`, for an optimizer that `can_step_in_parts`. Raises StorageError, after which the state
        is unusable."""
        if not parts:
            step(optimizer)
            return
        loaded: dict[int, _Loaded] = {}
        count = iter(range(len(parts)))

        def step_next(optimizer: Optimizer) -> None:
            number = next(count)
            if number not in loaded:
                loaded[number] = self._start(optimizer, parts[number])
            for ahead in range(number + 1, len(parts)):
                if ahead not in loaded:
                    if not self._find_free():
                        break
                    loaded[ahead] = self._start(optimizer, parts[ahead])
            own = loaded[number]
            own.reading.wait()
            for entry in own.entries:
                entry.take_from(own.buffer)
            step(optimizer)

        def end(number: int) -> None:
            own = loaded.pop(number)
            for entry in own.entries:
                entry.state[entry.key] = entry.mapped
            self._write(own.entries, own.buffer)
            self._keep_new(optimizer, parts[number])
            done(number)

        try:
            step_in_parts(optimizer, parts, step_next, end)
        finally:
            for number in list(loaded):  # after an error
                unused = loaded.pop(number)
                for entry in unused.entries:
                    entry.state[entry.key] = entry.mapped
                self._writing.append((unused.reading, unused.buffer))
            self._settle()

    def _start(self, optimizer: Optimizer, part: Sequence[Tensor]) -> _Loaded:
        """Begins to read the state of a part."""
        entries, start = [], 0
        for parameter in part:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                place = self._placed.get(local(value).data_ptr()) if isinstance(value, Tensor) else None
                if place is not None:
                    size = round_up(local(value).nbytes)
                    entries.append(_Entry(state, key, value, Piece(place[0], start, size)))
                    start += size
        buffer = self._take_buffer()
        buffer.reserve(start)
        return _Loaded(entries, buffer, self._file.read([entry.piece for entry in entries], buffer))

    def _keep_new(self, optimizer: Optimizer, part: Sequence[Tensor]) -> None:
        """Moves state that this step has created to the disk."""
        entries, start = [], 0
        values = []
        for parameter in part:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                own = local(value) if isinstance(value, Tensor) else None
                if own is None or own.nbytes < SMALL or own.data_ptr() in self._placed:
                    continue
                mapped = self.make(value, own.dtype)
                place = self._placed[local(mapped).data_ptr()][0]
                entries.append(_Entry(state, key, mapped, Piece(place, start, round_up(own.nbytes))))
                values.append(own)
                start += round_up(own.nbytes)
        if not entries:
            return
        buffer = self._take_buffer()
        buffer.reserve(start)
        for entry, value in zip(entries, values, strict=True):
            entry.take_from(buffer)
            local(entry.state[entry.key]).copy_(value)
            entry.state[entry.key] = entry.mapped
        self._write(entries, buffer)

    def _write(self, entries: Sequence[_Entry], buffer: Buffer) -> None:
        self._writing.append((self._file.write([entry.piece for entry in entries], buffer), buffer))

    def _find_free(self) -> bool:
        """Whether there is a buffer whose last write has ended."""
        while self._writing and self._writing[0][0].ended:
            self._end_oldest()
        return bool(self._free)

    def _take_buffer(self) -> Buffer:
        while not self._find_free():
            if not self._writing:
                return Buffer()  # all hold parts that were read ahead, while a part has new state to be written
            self._end_oldest()
        return self._free.pop()

    def _end_oldest(self) -> None:
        transfer, buffer = self._writing.popleft()
        self._free.append(buffer)
        transfer.wait()

    def _settle(self) -> None:
        """Waits for all transfers, so that the mappings may be used."""
        while self._writing:
            self._end_oldest()


def _view(memory: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The beginning of `memory` (uint8) as a tensor with the shape of `like`, and with its strides if it is dense."""
    flat = memory[: like.numel() * dtype.itemsize].view(dtype)
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


def _wrap(like: Tensor, part: Tensor) -> Tensor:
    """`part` as this rank's part of a tensor that is spread over ranks like `like`."""
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
