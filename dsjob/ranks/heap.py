"""Tells the C library to keep freed memory for the next step.

Training on the host frees and allocates the same buffers in each step: whole weights, gradients, activations. By
default, glibc returns them to the system, which then has to clear each page again before its first use.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEPT = 1 << 30  # bytes at the top of the heap that stay
_LARGE = 32 << 20  # bytes; glibc allows no more. Larger blocks are always returned


_SMALL = 1 << 20  # bytes


def keep_freed_memory() -> None:
    """Raises glibc's limits for this process, unless the user has set them. Does nothing with other C libraries."""
    _set_limits(_LARGE, _KEPT)


def return_freed_memory() -> None:
    """Lowers the limits again, for a process that has little memory: blocks above 1 MiB are returned when freed.

    Optimizer state that moves to a disk would otherwise leave holes in the heap, as large as the state.
    """
    _set_limits(_SMALL, _SMALL)


@contextmanager
def returning_memory(*, keeps: bool) -> Iterator[None]:
    """Within, freed blocks are returned, so that holes in the heap do not add up. keeps: whether freed memory is kept
    afterwards."""
    return_freed_memory()
    try:
        yield
    finally:
        if keeps:
            keep_freed_memory()


def _set_limits(large: int, kept: int) -> None:
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_MMAP_THRESHOLD, large)
    mallopt(_TRIM_THRESHOLD, kept)
