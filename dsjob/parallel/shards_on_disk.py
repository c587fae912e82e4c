"""Keeps the shards of a model on a local disk, and reads them before a unit of FSDP2 gathers them.

Between its uses, a shard is a mapping of a scratch file, so a checkpoint, the optimizer or a program reads and writes
it like any other tensor. Before a unit gathers its parameters, their shards are read into a buffer, past the page
cache. Meanwhile, those of the following units are read too, in the order in which the units were gathered last time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dsjob.contract.sharding import choose_kept
from dsjob.contract.spec import Zero
from dsjob.errors import ConfigWarning, StorageError
from dsjob.ops.disk import Buffer, Piece, Transfer, round_up
from dsjob.optim.on_disk import StateOnDisk
from dsjob.ranks.mesh import World
from dsjob.terminal import warn
from dsjob.torch_private.fsdp import list_sharded, pin_gradients, read_before_gathers, shard_memory, show_shard_in


class _Shard(NamedTuple):
    """An FSDPParam, the mapping of its shard (1-D), and its place in the file and in a buffer."""

    parameter: Any
    mapped: Tensor
    piece: Piece


class _Use(NamedTuple):
    """A unit, by its number, in the forward or the backward pass."""

    unit: int
    backward: bool


@dataclass(slots=True)
class _Read:
    """The shards of a unit in a buffer. copied: on a GPU, recorded after the last copy of them."""

    buffer: Buffer
    transfer: Transfer
    copied: torch.Event | None = None


class ShardsOnDisk:
    """The shards of the units of a model, of which a few at a time are in memory."""

    def __init__(self, units: Sequence[FSDPModule], disk: StateOnDisk | None, zero: Zero, world: World) -> None:
        """Moves shards to the disk, one after another. On rank 0, warns if there are none to move. Raises
        StorageError."""
        offload = zero.offload_param
        assert offload is not None
        assert disk is not None
        assert disk.weights is not None
        self._file = disk.weights
        self._most = offload.buffer_size
        self.ends = True  # whether the optimizer steps after the next backward pass
        self._pins = offload.pin_memory and world.device.type == "cuda"
        self._free = [Buffer(self._pins) for _ in range(max(offload.buffer_count, 1))]
        self._count = len(self._free)
        self._copied: deque[tuple[torch.Event, Buffer]] = deque()  # buffers that a GPU may still copy from
        self._reads: dict[int, _Read] = {}  # by unit, oldest first
        self._following: dict[_Use, _Use] = {}
        self._last = _Use(-1, backward=True)
        known = [parameter for unit in units for parameter in list_sharded(unit)]
        kept = choose_kept([shard_memory(parameter).numel() for parameter in known], offload.max_in_cpu)
        for number, parameter in enumerate(known):
            memory = shard_memory(parameter)
            if number not in kept:
                show_shard_in(parameter, disk.keep(memory, memory.dtype), whole=True)
            elif self._pins:
                show_shard_in(parameter, memory.pin_memory(), whole=True)
            if self._pins:
                pin_gradients(parameter)
        if len(kept) == len(known) and world.everyone.rank == 0:
            message = (
                "offload_param.device is nvme, but all parameters stay in memory:"
                f" a rank has at most max_in_cpu elements ({offload.max_in_cpu:,}); set it to 0 to move all of them"
            )
            warn(message, ConfigWarning, stacklevel=2)
        alone = world.data_mesh.size(-1) == 1
        self._shards = [self._list_shards(unit) for unit in units]
        self._sizes = [sum(shard.mapped.numel() for shard in shards) for shards in self._shards]
        for number, unit in enumerate(units):
            if self._shards[number]:
                read_before_gathers(unit, partial(self._load, number), partial(self._release, number), alone=alone)

    def _list_shards(self, unit: FSDPModule) -> list[_Shard]:
        memories = [(parameter, shard_memory(parameter)) for parameter in list_sharded(unit)]
        found = [(p, memory, offset) for p, memory in memories if (offset := self._file.find(memory)) is not None]
        sizes = [round_up(memory.nbytes) for _, memory, _ in found]
        places = zip(found, accumulate(sizes, initial=0), sizes, strict=False)
        return [_Shard(p, memory, Piece(offset, start, size)) for (p, memory, offset), start, size in places]

    def _load(self, unit: int, backward: bool) -> None:
        """Makes FSDP2 gather a unit's shards from a buffer, after reading them there."""
        use = _Use(unit, backward)
        self._following[self._last] = self._last = use
        if unit not in self._reads:
            self._start(unit)
        self._read_ahead()
        read = self._reads[unit]
        read.transfer.wait()
        for shard in self._shards[unit]:
            start, like = shard.piece.start, shard.mapped
            show_shard_in(shard.parameter, read.buffer.bytes[start : start + like.nbytes].view(like.dtype))

    def _list_coming(self) -> list[int]:
        """The units that are expected next, as many as there are buffers, up to the optimizer's step."""
        coming: dict[int, None] = {}
        use = self._last
        for _ in range(2 * len(self._shards)):  # the uses of a step: each unit twice
            following = self._following.get(use)
            if following is None or (self.ends and use.backward and not following.backward):
                break
            use = following
            if len(coming) == self._count and use.unit not in coming:
                break
            coming[use.unit] = None
        return list(coming)

    def _read_ahead(self) -> None:
        for unit in self._list_coming():
            if unit not in self._reads:
                if not self._find_free() or self._sizes[unit] > self._most:
                    return
                self._start(unit)

    def _start(self, unit: int) -> None:
        pieces = [shard.piece for shard in self._shards[unit]]
        if not self._find_free():
            self._make_free()
        buffer = self._free.pop()
        buffer.reserve(sum(piece.size for piece in pieces))
        self._reads[unit] = _Read(buffer, self._file.read(pieces, buffer))

    def _find_free(self) -> bool:
        """Whether there is a buffer that nothing uses."""
        while self._copied and self._copied[0][0].query():
            self._free.append(self._copied.popleft()[1])
        return bool(self._free)

    def _make_free(self) -> None:
        if not self._copied:
            self._drop(next(iter(self._reads)))  # it was read ahead, but then another unit was gathered
        while self._copied:
            event, buffer = self._copied.popleft()
            event.synchronize()
            self._free.append(buffer)

    def _release(self, unit: int, copied: torch.Event | None) -> None:
        """Takes back the buffer of a unit that was gathered, unless it will be gathered again soon."""
        read = self._reads[unit]
        if self._pins:
            read.copied = copied or torch.cuda.current_stream().record_event()
        for shard in self._shards[unit]:
            show_shard_in(shard.parameter, shard.mapped)
        if unit not in self._list_coming():
            self._drop(unit)
        self._read_ahead()

    def _drop(self, unit: int) -> None:
        read = self._reads.pop(unit)
        with suppress(StorageError):  # whoever needs these shards reads them again, and gets the error
            read.transfer.wait()
        if read.copied is not None:
            self._copied.append((read.copied, read.buffer))
        else:
            self._free.append(read.buffer)

    def forget(self) -> None:
        """Drops what was read: the shards are about to change, or have changed."""
        for unit in list(self._reads):
            self._drop(unit)
