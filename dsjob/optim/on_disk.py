"""Optimizer state and fp32 masters on local disks, stepped part by part.

Between steps, the large tensors are mappings of a scratch file, so a checkpoint, or a program, reads and writes them
like any other tensor. A step reads one part of the parameters after another, with its state, into buffers, past the
page cache. While a part is stepped, the next ones are read and earlier ones are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsjob.contract.sharding import DISK_PART
from dsjob.errors import UsageError
from dsjob.ops.disk import Buffer, Piece, ScratchFile, Transfer, round_up
from dsjob.optim.parts import can_step_in_parts, step_in_parts
from dsjob.optim.shards import local
from dsjob.torch_private import find_part, with_part

SMALL = 64 << 10  # bytes: a smaller tensor stays in memory, since a request would take longer than its bytes
PART = DISK_PART  # Adam's averages take twice as many bytes in the same buffer

_Move = Callable[[ScratchFile, Sequence[Piece], Buffer], Transfer]


class _Entry(NamedTuple):
    """This rank's part of a tensor: its file, the object that the optimizer uses, its mapping, and its place in the
    file and in a buffer. `tensor.data` is set to one memory or the other: the optimizer keeps its objects, also inside
    of DTensors.
    """

    file: ScratchFile
    tensor: Tensor
    mapped: Tensor
    piece: Piece

    def view(self, buffer: Buffer) -> Tensor:
        """The values whose bytes are in a buffer."""
        return _view(buffer.bytes[self.piece.start :], self.mapped, self.mapped.dtype)


class _Loaded(NamedTuple):
    entries: list[_Entry]
    buffer: Buffer
    reading: Transfer

    def give_back(self) -> None:
        """Makes the optimizer use the mappings again."""
        for entry in self.entries:
            entry.tensor.data = entry.mapped


class StateOnDisk:
    """What one optimizer on this rank keeps on disks."""

    def __init__(self, weights: ScratchFile | None, state: ScratchFile | None, buffers: int) -> None:
        """weights, state: the files of masters and of the optimizer's state, which may be the same; None: what stays in
        memory. buffers: how many; each holds the tensors of one part."""
        self.weights, self._state = weights, state
        self._files = [file for file in dict.fromkeys((weights, state)) if file is not None]
        self._free = [Buffer() for _ in range(max(buffers, 1))]
        self._writing: deque[tuple[Transfer, Buffer]] = deque()

    def require(self, optimizer: Optimizer) -> None:
        """Raises UsageError for an optimizer that cannot step part by part."""
        if not can_step_in_parts(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} cannot step its state from a disk, part by part: it needs all parameters"
                " at once, or is neither torch's nor dsjob's, or has hooks",
                hint="use zero_optimization.offload_optimizer.device=cpu, or AdamW",
            )

    def make(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor of the optimizer's state, on the host, with the shape and placement of `like`: on the disk,
        unless it is small. Raises StorageError."""
        return self._make(self._state, like, dtype)

    def _make(self, file: ScratchFile | None, like: Tensor, dtype: torch.dtype) -> Tensor:
        own = local(like)
        if file is None or own.numel() * dtype.itemsize < SMALL:
            return torch.empty_like(like, dtype=dtype, device="cpu")
        part = _map(file, own, dtype)
        return with_part(like, part) if isinstance(like, DTensor) else part

    @torch.no_grad()
    def keep(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `values`, which are weights, on the host: on the disk, unless it is small. Raises StorageError."""
        kept = self._make(self.weights, values, dtype)
        entry = self._find(local(kept), 0)
        if entry is None:
            local(kept).copy_(local(values))
        else:
            buffer = self._take_buffer(entry.piece.size)
            entry.view(buffer).copy_(local(values))
            self._write([entry], buffer)
            self._settle()
        return kept

    def sync(self) -> None:
        """Call it after writing into tensors: raises StorageError if a write has failed."""
        for file in self._files:
            file.sync()

    @torch.no_grad()
    def step(
        self,
        optimizer: Optimizer,
        parts: Sequence[Sequence[Tensor]],
        step: Callable[[Optimizer], object],
        done: Callable[[int], None],
    ) -> None:
        """Like `step_in_parts`. `done` finds the new weights in memory.

        Raises StorageError, after which the state is unusable, and UsageError as `require` does.
        """
        self.require(optimizer)
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
                entry.tensor.data = entry.view(own.buffer)
            step(optimizer)

        def end(number: int) -> None:
            done(number)
            own = loaded.pop(number)
            own.give_back()
            self._write(own.entries, own.buffer)
            self._keep_new(optimizer, parts[number])

        try:
            step_in_parts(optimizer, parts, step_next, end)
        finally:
            for number in list(loaded):  # after an error
                unused = loaded.pop(number)
                unused.give_back()
                self._writing.append((unused.reading, unused.buffer))
            self._settle()

    def _start(self, optimizer: Optimizer, part: Sequence[Tensor]) -> _Loaded:
        """Begins to read the masters and the state of a part."""
        entries, start = [], 0
        for tensor in chain(map(find_part, part), _list_state(optimizer, part)):
            entry = self._find(tensor, start)
            if entry is not None:
                entries.append(entry)
                start += entry.piece.size
        buffer = self._take_buffer(start)
        return _Loaded(entries, buffer, self._move(ScratchFile.read, entries, buffer))

    def _keep_new(self, optimizer: Optimizer, part: Sequence[Tensor]) -> None:
        """Moves state that this step has created to the disk."""
        if self._state is None:
            return
        entries, start = [], 0
        for tensor in _list_state(optimizer, part):
            if tensor.nbytes < SMALL or self._state.find(tensor) is not None:
                continue
            entry = self._find(_map(self._state, tensor, tensor.dtype), start)
            assert entry is not None
            entries.append(entry._replace(tensor=tensor))
            start += entry.piece.size
        if not entries:
            return
        buffer = self._take_buffer(start)
        for entry in entries:
            entry.view(buffer).copy_(entry.tensor)
            entry.tensor.data = entry.mapped
        self._write(entries, buffer)

    def _find(self, tensor: Tensor, start: int) -> _Entry | None:
        """The entry of a tensor on a disk, `start` bytes into a buffer; None if it is in memory."""
        for file in self._files:
            offset = file.find(tensor)
            if offset is not None:
                return _Entry(file, tensor, tensor.data, Piece(offset, start, round_up(tensor.nbytes)))
        return None

    def _write(self, entries: Sequence[_Entry], buffer: Buffer) -> None:
        self._writing.append((self._move(ScratchFile.write, entries, buffer), buffer))

    def _move(self, move: _Move, entries: Sequence[_Entry], buffer: Buffer) -> Transfer:
        """Begins to read or write entries, each in its file."""
        by_file = [(file, [entry.piece for entry in entries if entry.file is file]) for file in self._files]
        return Transfer.join(move(file, pieces, buffer) for file, pieces in by_file)

    def _find_free(self) -> bool:
        """Whether there is a buffer whose last write has ended."""
        while self._writing and self._writing[0][0].ended:
            self._end_oldest()
        return bool(self._free)

    def _take_buffer(self, size: int) -> Buffer:
        """A buffer with room for `size` bytes."""
        while not self._find_free() and self._writing:
            self._end_oldest()
        # There is none if all hold parts that were read ahead, while a part has new state to be written.
        buffer = self._free.pop() if self._free else Buffer()
        buffer.reserve(size)
        return buffer

    def _end_oldest(self) -> None:
        transfer, buffer = self._writing.popleft()
        self._free.append(buffer)
        transfer.wait()

    def _settle(self) -> None:
        """Waits for all transfers, so that the mappings may be used."""
        while self._writing:
            self._end_oldest()


def _list_state(optimizer: Optimizer, part: Sequence[Tensor]) -> Iterator[Tensor]:
    """This rank's parts of the tensors in the state of `part`."""
    for parameter in part:
        yield from (find_part(v) for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))


def _map(file: ScratchFile, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor on the disk with the shape of `like`."""
    size = like.numel() * dtype.itemsize
    return _view(file.map(file.allocate(size), size), like, dtype)


def _view(memory: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The beginning of `memory` (uint8) as a tensor with the shape of `like`, and with its strides if it is dense."""
    flat = memory[: like.numel() * dtype.itemsize].view(dtype)
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
