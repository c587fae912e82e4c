"""`deepspeed.ops.aio`: reads and writes tensors in files, in threads, past the page cache where that is possible."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder
from dsjob.deepspeed.ops.op_builder import PinMemoryBuilder as PinMemoryBuilder
from dsjob.errors import StorageError, UsageError
from dsjob.ops.disk import PAGE, Buffer, round_up

_DIRECT = getattr(os, "O_DIRECT", 0)
# The page-locked memory of all handles: its bytes, by address.
_locked: dict[int, Tensor] = {}


class pin_handle:  # noqa: N801  # DeepSpeed's name
    """Page-locked memory. All handles of a process know the tensors of each other."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of `num_elem` elements on the host with the example's dtype, in page-locked memory aligned to pages.

        Free it with `free_cpu_locked_tensor`. Raises UsageError if the system allows no more.
        """
        pin = torch.cuda.is_available()
        buffer, size = Buffer(pin), num_elem * example_tensor.element_size()
        buffer.reserve(max(size, 1))
        if not pin and ctypes.CDLL(None, use_errno=True).mlock(*_find_range(buffer.bytes)) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise UsageError(f"cannot lock {size:,} bytes of memory: {reason}", hint="raise the limit: ulimit -l")
        _locked[buffer.bytes.data_ptr()] = buffer.bytes
        made: Tensor = buffer.bytes[:size].view(example_tensor.dtype)
        return made

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Unlocks memory, which is freed with its last tensor. Returns whether `tensor` begins such memory."""
        found = _locked.pop(tensor.data_ptr(), None)
        if found is not None and not found.is_pinned():
            ctypes.CDLL(None).munlock(*_find_range(found))
        return found is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in page-locked memory: a handle's, or torch's."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = (first <= start and end <= first + found.nbytes for first, found in _locked.items())
        return tensor.is_pinned() or any(inside)


class aio_handle(pin_handle):  # noqa: N801  # DeepSpeed's name
    """Reads files into tensors and writes tensors to files, from any offset, in `intra_op_parallelism` threads.

    Tensors are contiguous; those on a GPU go through memory of the host. Calls return the number of finished requests,
    which is 0 if they do not wait. `block_size`: bytes per system call, rounded up to pages. `queue_depth`,
    `single_submit` and `overlap_events` are only kept: they configure Linux's libaio, which is not used here. Errors
    are StorageErrors, raised where a request is waited for.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._sizes = block_size, queue_depth, intra_op_parallelism
        self._flags = single_submit, overlap_events
        self._pool = ThreadPoolExecutor(intra_op_parallelism, thread_name_prefix="dsjob-aio")
        self._requests: list[Callable[[], None]] = []  # each waits for one request, and ends it

    def get_block_size(self) -> int:
        """The argument of the handle."""
        return self._sizes[0]

    def get_queue_depth(self) -> int:
        """The argument of the handle."""
        return self._sizes[1]

    def get_single_submit(self) -> bool:
        """The argument of the handle."""
        return self._flags[0]

    def get_overlap_events(self) -> bool:
        """The argument of the handle."""
        return self._flags[1]

    def get_intra_op_parallelism(self) -> int:
        """The argument of the handle."""
        return self._sizes[2]

    def get_alignment(self) -> int:
        """The bytes that a tensor's address, size and offset are best multiples of: only then, the page cache is
        bypassed."""
        return int(PAGE)

    def read(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Reads a whole file. Returns 0."""
        size = _read_size(filename)
        if file_offset + buffer.nbytes != size:
            raise UsageError(f"{filename} has {size:,} bytes, but the tensor {buffer.nbytes:,}", hint="use pread")
        self.sync_pread(buffer, filename, file_offset)
        return 0

    def write(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Writes a tensor. Returns 0."""
        self.sync_pwrite(buffer, filename, file_offset)
        return 0

    def pread(
        self, buffer: Tensor, filename: str, validate: bool = False, is_async: bool = False, file_offset: int = 0
    ) -> int:
        """Reads as many bytes as the tensor has. `validate` has no effect: a short read is always an error."""
        host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        descriptor, memory = _open(filename, os.O_RDONLY, host, file_offset), _view_bytes(host)

        def finish() -> None:
            if host is not buffer:
                buffer.copy_(host)

        return self._start(os.preadv, memory, descriptor, file_offset, str(filename), finish, is_async)

    def pwrite(
        self, buffer: Tensor, filename: str, validate: bool = False, is_async: bool = False, file_offset: int = 0
    ) -> int:
        """Writes a tensor. Creates the file if needed, and keeps its other bytes."""
        host = buffer.cpu()
        memory = _view_bytes(host)
        descriptor = _open(filename, os.O_WRONLY | os.O_CREAT, host, file_offset)
        return self._start(os.pwritev, memory, descriptor, file_offset, str(filename), lambda: None, is_async)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Reads, and waits for all requests of the handle."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Writes, and waits for all requests of the handle."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Begins to read. The tensor is complete after `wait`."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self, buffer: Tensor, filename: str | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Begins to write, to a file or to an open descriptor. Do not change the tensor before `wait`."""
        if filename is not None:
            return self.pwrite(buffer, filename, False, True, file_offset)
        if fd is None:
            raise UsageError("async_pwrite needs filename or fd")
        host = buffer.cpu()
        return self._start(
            os.pwritev, _view_bytes(host), os.dup(fd), file_offset, f"descriptor {fd}", lambda: None, True
        )

    def wait(self) -> int:
        """Waits for all requests of the handle. Returns their number. Raises the first error: a StorageError."""
        requests, self._requests = self._requests, []
        errors = []
        for finish in requests:
            try:
                finish()
            except StorageError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return len(requests)

    def _start(
        self,
        call: Callable[..., int],
        memory: memoryview,
        descriptor: int,
        offset: int,
        name: str,
        finish: Callable[[], None],
        is_async: bool,
    ) -> int:
        """Begins one request, which closes the descriptor when it ends."""
        block, size = round_up(self._sizes[0]), len(memory)
        parts: list[Future[None]] = [
            self._pool.submit(_move, call, memory[done : done + block], descriptor, offset + done, name)
            for done in range(0, size, block)
        ]

        def end() -> None:
            errors = [part.exception() for part in parts]
            os.close(descriptor)
            for error in filter(None, errors):
                raise error
            finish()

        self._requests.append(end)
        return 0 if is_async else self.wait()


def _move(call: Callable[..., int], memory: memoryview, descriptor: int, offset: int, name: str) -> None:
    """Moves all of `memory`. A call may move less than it was asked to."""
    while len(memory):
        try:
            moved = call(descriptor, [memory], offset)
        except OSError as error:
            raise _explain(name, error) from error
        if moved <= 0:
            raise _explain(name, OSError(errno.EIO, f"it ends before byte {offset + len(memory):,}"))
        memory, offset = memory[moved:], offset + moved


def _open(filename: str, flags: int, host: Tensor, offset: int) -> int:
    """A descriptor, which bypasses the page cache if the tensor and the offset are aligned to pages."""
    aligned = not any(number % PAGE for number in (host.data_ptr(), host.nbytes, offset))
    try:
        if aligned and _DIRECT:
            try:
                return os.open(filename, flags | _DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:  # what file systems without O_DIRECT answer
                    raise
        return os.open(filename, flags, 0o666)
    except OSError as error:
        raise _explain(str(filename), error) from error


def _view_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the host."""
    if not tensor.is_contiguous():
        raise UsageError("a tensor that is read or written must be contiguous", hint="call contiguous()")
    memory: Any = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return memoryview(memory)


def _find_range(memory: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)


def _read_size(filename: str) -> int:
    try:
        return os.stat(filename).st_size
    except OSError as error:
        raise _explain(str(filename), error) from error


def _explain(name: str, error: OSError) -> StorageError:
    return StorageError(f"cannot read or write {name}: {error.strerror}", hint="check the file and its disk")


__path__ = _stand_for(__name__)
__getattr__ = _explain_names(__name__)
