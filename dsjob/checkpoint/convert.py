"""`dsjob convert`: checkpoints to plain weights, read from anywhere and written as fp32, bf16 or fp16.

Reading, streaming and writing are those of `zero_to_fp32.py`. This module adds sources by URL, the dtypes by numpy, and
the project's errors. It imports no torch.
"""

from __future__ import annotations

import functools
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dsjob import storage
from dsjob.checkpoint import zero_to_fp32 as plain
from dsjob.checkpoint.zero_to_fp32 import Written
from dsjob.errors import CorruptCheckpointError, NoCheckpointError, StorageError, UsageError

__all__ = ["DTYPES", "UrlFolder", "Written", "convert", "parse_size"]

logger = logging.getLogger(__name__)
Array = npt.NDArray[Any]

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
BLOCK = 1 << 20  # bytes: what is smaller is cut out of a block that is kept, since each read by URL is a request


def convert(
    source: str,
    out: str | None,
    *,
    to: Literal["fp32", "bf16", "fp16"],
    tag: str | None = None,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Written]:
    """Writes a checkpoint's parameters and buffers as safetensors files; returns what was written.

    source: a run's folder (with `checkpoints/` in it), a checkpoint folder or one step's folder; a path or a URL.
    out: a local folder, or a local path that ends in `.safetensors`; by default the checkpoint folder, if it is local.
    to: what F64, F32, F16 and BF16 become, rounded to nearest even; other dtypes stay as they are.
    tag: which checkpoint; by default the newest. max_shard_size: bytes of tensors in one file of a folder.
    progress: told the bytes written and those to write in all.

    Memory is bounded by a few buffers. The output appears complete or not at all. Values beyond the range of `to`
    become infinite, which a warning counts by tensor. Raises UsageError, NoCheckpointError, CorruptCheckpointError,
    StorageError.
    """
    with _renamed(source):
        place, record = _locate(source, tag)
        if out is None and isinstance(place, UrlFolder):
            raise UsageError(f"{source} is not a local folder, and no output was named", hint="name a local folder")
        target = place.root if out is None else out
        if not storage.is_local(target):
            raise UsageError(
                f"cannot write weights to {target}", hint="name a local folder, and copy it there afterwards"
            )
        checkpoint, cast = plain.read_checkpoint(place, record), Rounded(DTYPES[to])
        report = progress or (lambda done, total: None)
        path = storage.local_path(target)
        written = plain.export(place, checkpoint, path, cast, max_shard_size, overwrite, report)
    if cast.overflows:
        worst = sorted(cast.overflows.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} ({count})" for name, count in worst[:5]) + (", ..." if worst[5:] else "")
        total = sum(cast.overflows.values())
        logger.warning("%d values are beyond the range of %s and became infinite, in %s", total, to, listed)
    return written


def parse_size(text: str) -> int:
    """Bytes of "5GB" (10^9), "500MB", "2GiB" (2^30) or "1000"; UsageError where it is none of these."""
    with _renamed(text):
        return plain.parse_size(text)


def _open_root(url: str) -> plain.Folder:
    return plain.Folder(storage.local_path(url)) if storage.is_local(url) else UrlFolder(url)


def _locate(source: str, tag: str | None) -> tuple[plain.Folder, dict[str, Any]]:
    """The checkpoint root that `source` means, and the commit record to convert."""
    place = _open_root(source)
    if not place.names("commits"):
        below = _open_root(storage.join(place.root, "checkpoints"))
        place = below if below.names("commits") else place
    head, _, name = place.root.rstrip("/").rpartition("/")
    has_parent = bool(name) and not head.endswith((":", ":/"))  # not above the bucket of a URL
    return plain.locate(place, _open_root(head or "/") if has_parent else place, name, tag)


@contextmanager
def _renamed(source: str) -> Iterator[None]:
    """Renames what reading, writing and the script raise into the project's errors."""
    try:
        yield
    except plain.Damaged as error:
        raise CorruptCheckpointError(error.message, hint=error.hint) from error
    except plain.NothingThere as error:
        raise NoCheckpointError(error.message, hint=error.hint) from error
    except plain.Refused as error:
        raise UsageError(error.message, hint=error.hint) from error
    except OSError as error:
        raise StorageError(f"cannot convert {source}: {error}") from error


class UrlFolder(plain.Folder):
    """A checkpoint root at a URL, read by ranges: large ones as they are asked for, small ones through kept blocks."""

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self.size = functools.lru_cache(maxsize=4096)(self._size)
        self.block = functools.lru_cache(maxsize=64)(self._block)

    def names(self, folder: str) -> list[str]:
        """See Folder."""
        return storage.list_names(storage.join(self.root, folder))

    def open_file(self, name: str) -> io.RawIOBase:
        """See Folder."""
        return _UrlFile(self, name, self.size(name))

    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes of a file from `start` up to `end`, or up to its end."""
        return storage.read_bytes(storage.join(self.root, name), start, end)

    def _size(self, name: str) -> int:
        try:
            return storage.size(storage.join(self.root, name))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise FileNotFoundError(error.message) from error
            raise

    def _block(self, name: str, index: int) -> bytes:
        return self.read(name, index * BLOCK, min((index + 1) * BLOCK, self.size(name)))


class _UrlFile(io.RawIOBase):
    """A file of a UrlFolder, from any position."""

    def __init__(self, folder: UrlFolder, name: str, size: int) -> None:
        self.folder, self.name, self.length, self.position = folder, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self.length - self.position))
        if count >= BLOCK:
            data = self.folder.read(self.name, self.position, self.position + count)
        elif count:
            index, start = divmod(self.position, BLOCK)
            data = self.folder.block(self.name, index)[start : start + count]
        else:
            data = b""
        view[: len(data)] = data
        self.position += len(data)
        return len(data)


class Rounded(plain.Fp32):
    """What is written: floating dtypes become `dtype` (F32, BF16 or F16) by way of F32, as torch's `to` does.

    `overflows` counts, by tensor, the finite values that became infinite.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.overflows: dict[str, int] = {}

    def target(self, dtype: str) -> str:
        """See Fp32."""
        return self.dtype if dtype in ("F64", "F32", "F16", "BF16") else dtype

    def __call__(self, name: str, dtype: str, block: memoryview) -> memoryview:
        """See Fp32."""
        if self.target(dtype) == dtype:
            return block
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            before = np.frombuffer(block, "<f8") if dtype == "F64" else _widen(dtype, block)
            wide = before.astype("<f4", copy=False)
            if self.dtype == "BF16":
                after = _round_to_bf16(wide)
                infinite = (after & 0x7FFF) == 0x7F80
            else:
                after = wide.astype("<f2" if self.dtype == "F16" else "<f4", copy=False)
                infinite = np.isinf(after)
        count = int(np.count_nonzero(infinite & np.isfinite(before)))
        if count:
            self.overflows[name] = self.overflows.get(name, 0) + count
        return after.view(np.uint8).data


def _widen(dtype: str, block: memoryview) -> Array:
    """Elements of F32, BF16 or F16 as float32; bit for bit what the script makes of them."""
    if dtype == "F32":
        return np.frombuffer(block, "<f4")
    bits = np.frombuffer(block, "<u2")
    if dtype == "BF16":
        wide: Array = (bits.astype("<u4") << 16).view("<f4")
        return wide
    by_table: Array = _half_bits()[bits].view("<f4")  # the machine's own conversion makes signalling NaNs quiet
    return by_table


@functools.cache
def _half_bits() -> Array:
    table: Array = np.array(plain.half_bits(), "<u4")
    return table


def _round_to_bf16(wide: Array) -> Array:
    """float32 to the bits of bfloat16, to nearest even; NaNs stay NaNs, with their sign and upper payload."""
    bits = wide.view("<u4")
    # Half of the last place that is kept, less one unless that place is odd: ties go to even.
    rounded: Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    nan = np.isnan(wide)
    rounded[nan] = (bits[nan] >> 16) | 0x40
    return rounded
