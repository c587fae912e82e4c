"""A file on a local disk for data that does not fit into memory.

Reads and writes bypass the page cache (O_DIRECT), where the file system allows it. Threads issue them. The calls
release the GIL, and a few threads reach the rate of the disk (`benchmarks/nvme.py`), so there is nothing to compile.

The file has no name. So no other process can open it, and the system frees its space when the process ends, however it
ends: a killed run leaves nothing behind.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from dsjob.errors import StorageError

PAGE = max(4096, mmap.PAGESIZE)  # bytes; O_DIRECT needs addresses, offsets and lengths that are multiples of it


def round_up(size: int) -> int:
    """The smallest multiple of `PAGE` that is not below `size`."""
    return -(-size // PAGE) * PAGE


class Buffer:
    """Memory for transfers, aligned to `PAGE`. It grows, but never shrinks. pin: page-locked memory, for a GPU."""

    def __init__(self, pin: bool = False) -> None:
        self._pin = pin
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Makes room for `size` bytes. What the buffer held is lost if it has to grow."""
        if self.bytes.numel() >= size:
            return
        self.bytes = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
        if self._pin:
            locked = torch.empty(round_up(size) + PAGE, dtype=torch.uint8, pin_memory=True)
            self.bytes = locked[-locked.data_ptr() % PAGE :][: round_up(size)]
        else:
            # Private, so that limits on a process's memory count it, and worker processes get no part of it.
            memory = mmap.mmap(-1, round_up(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)


class Piece(NamedTuple):
    """A range of the file, and where it starts in a buffer. All three are multiples of `PAGE`."""

    offset: int
    start: int
    size: int


class Transfer:
    """Reads or writes that threads are working on."""

    def __init__(self, requests: list[Future[None]]) -> None:
        self._requests = requests

    @classmethod
    def join(cls, transfers: Iterable[Transfer]) -> Transfer:
        """All of `transfers` as one."""
        return cls([request for transfer in transfers for request in transfer._requests])

    @property
    def ended(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(request.done() for request in self._requests)

    def wait(self) -> None:
        """Waits for all requests, then raises the first error: a StorageError."""
        errors = [request.exception() for request in self._requests]
        for error in filter(None, errors):
            raise error


class ScratchFile:
    """A file without a name. Its content is gone when the object, or the process, is.

    direct: whether it bypasses the page cache.
    """

    def __init__(self, folder: str, *, block_size: int = 1 << 20, requests: int = 8) -> None:
        """folder: created if missing. block_size: bytes per request. requests: in flight at a time.

        Raises StorageError.
        """
        self.folder, self.size = folder, 0
        self._block = round_up(block_size)
        # By address: a mapping and its offset. As long as it is here, no other tensor can have its address.
        self._mapped: dict[int, tuple[Tensor, int]] = {}
        try:
            os.makedirs(folder, exist_ok=True)
            self._fd, self.direct = _open(folder)
        except OSError as error:
            raise self._explain("create a file in", error) from error
        self._pool = ThreadPoolExecutor(requests, thread_name_prefix="dsjob-disk")
        _open_files.add(self)

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=True)
            os.close(self._fd)

    def allocate(self, size: int) -> int:
        """Reserves `size` bytes on the disk, rounded up to pages. Returns their offset. Raises StorageError."""
        offset, self.size = self.size, self.size + round_up(size)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, offset, self.size - offset)
            else:
                os.ftruncate(self._fd, self.size)
        except OSError as error:
            self.size = offset
            raise self._explain(f"reserve {size:,} bytes in", error) from error
        return offset

    def map(self, offset: int, size: int) -> Tensor:
        """A range of the file as a tensor: uint8 [size]. Only what is touched takes memory, which the system can take
        back.

        Do not use it while a transfer of the same range is under way. If the disk fails while it is read, the system
        kills the process; `read_mapped` raises an error instead.
        """
        mapped = torch.frombuffer(mmap.mmap(self._fd, round_up(size), offset=offset), dtype=torch.uint8)
        self._mapped[mapped.data_ptr()] = mapped, offset
        return mapped[:size]

    def find(self, tensor: Tensor) -> int | None:
        """The offset of the mapping that `tensor` is a view of; None if it is elsewhere."""
        known = self._mapped.get(tensor.untyped_storage().data_ptr())
        return known[1] if known is not None else None

    def sync(self) -> None:
        """Waits until everything that was written through mappings is on the disk. Raises StorageError if it failed."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._explain("write to", error) from error

    def read(self, pieces: Sequence[Piece], buffer: Buffer) -> Transfer:
        """Begins to read pieces into a buffer."""
        return self._submit("read from", os.preadv, pieces, buffer)

    def write(self, pieces: Sequence[Piece], buffer: Buffer) -> Transfer:
        """Begins to write pieces from a buffer, which must not change until the transfer has ended."""
        return self._submit("write to", os.pwritev, pieces, buffer)

    def _submit(self, what: str, call: Callable[..., int], pieces: Sequence[Piece], buffer: Buffer) -> Transfer:
        memory = memoryview(buffer.bytes.numpy().data)
        requests = []
        for piece in _join(pieces):
            for done in range(0, piece.size, self._block):
                size = min(self._block, piece.size - done)
                part = memory[piece.start + done : piece.start + done + size]
                requests.append(self._pool.submit(self._move, what, call, part, piece.offset + done))
        return Transfer(requests)

    def _move(self, what: str, call: Callable[..., int], memory: memoryview, offset: int) -> None:
        """Moves all of `memory`. A call may move less than it was asked to."""
        while len(memory):
            try:
                moved = call(self._fd, [memory], offset)
            except OSError as error:
                raise self._explain(what, error) from error
            if moved <= 0:
                raise self._explain(what, OSError(errno.EIO, f"no data at byte {offset:,} of {self.size:,}"))
            memory, offset = memory[moved:], offset + moved

    def _explain(self, what: str, error: OSError) -> StorageError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        free = "free space there, or choose a folder on another disk"
        return StorageError(
            f"cannot {what} {self.folder}: {error.strerror}",
            hint=free if full else "check the folder and its disk, or choose a folder on another disk",
        )


_open_files: WeakSet[ScratchFile] = WeakSet()


def read_mapped(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in memory if it is a mapping of a scratch file; otherwise `tensor` itself.

    Raises StorageError if the disk fails.
    """
    for file in list(_open_files):
        offset = file.find(tensor)
        if offset is None:
            continue
        buffer, size = Buffer(), round_up(tensor.untyped_storage().nbytes())
        buffer.reserve(size)
        file.read([Piece(offset, 0, size)], buffer).wait()
        memory = torch.empty(0, dtype=tensor.dtype)
        return memory.set_(buffer.bytes.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor


def _open(folder: str) -> tuple[int, bool]:
    """A descriptor of a new file without a name, and whether it bypasses the page cache."""
    nameless, direct = getattr(os, "O_TMPFILE", 0), getattr(os, "O_DIRECT", 0)
    for flags in (direct, 0) if nameless else ():
        try:
            return os.open(folder, nameless | os.O_RDWR | os.O_EXCL | flags, 0o600), bool(flags)
        except OSError as error:
            # What file systems without O_DIRECT, or without nameless files, answer.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
    descriptor, path = tempfile.mkstemp(prefix="dsjob-", dir=folder)
    os.unlink(path)
    return descriptor, False


def _join(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins pieces that continue each other, so that many small ones become one request."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.offset + last.size, last.start + last.size) == (piece.offset, piece.start):
            joined[-1] = last._replace(size=last.size + piece.size)
        else:
            joined.append(piece)
    return joined
