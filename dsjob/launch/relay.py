"""Relays the output of ranks: to a notebook or test, which does not print to the descriptors that a process inherits,
and to log files, in which secret values are masked."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from io import BufferedWriter
from typing import TextIO, cast

from dsjob.contract import masking
from dsjob.contract.output_filter import Mask, to_bytes
from dsjob.files import open_append


class Relay:
    """Pipes for the output of ranks. `pass_on` copies what has arrived.

    The thread that waits for the ranks calls `pass_on`, because a notebook shows a thread's output in the cell that
    started it. Reads never block: processes that a rank has started may keep a pipe open after the run.
    """

    def __init__(self) -> None:
        self._pipes: list[tuple[int, Callable[[bytes], None]]] = []
        self._ends = ExitStack()

    def open_stream(self, stream: TextIO) -> int:
        """A pipe whose content is copied to `stream`. The caller closes it once a rank has inherited it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def write(data: bytes) -> None:
            # The decoder keeps an incomplete character until its other bytes arrive.
            stream.write(decoder.decode(data))
            stream.flush()

        return self._open(write)

    def open_log(self, path: str) -> int:
        """A pipe whose content is added to a file, masked."""
        mask = Mask(map(to_bytes, masking.list_spellings()))
        file = self._ends.enter_context(cast("BufferedWriter", open_append(path)).detach())  # unbuffered

        def add(text: str) -> None:
            with suppress(OSError):  # a full disk does not end the run
                file.write(text.encode("latin-1"))

        self._ends.callback(lambda: add(mask.end()))
        return self._open(lambda data: add(mask.add(data.decode("latin-1"))))

    def _open(self, write: Callable[[bytes], None]) -> int:
        source, end = os.pipe()
        os.set_blocking(source, False)
        self._pipes.append((source, write))
        self._ends.callback(os.close, source)
        return end

    def pass_on(self) -> None:
        """Copies the output since the last call."""
        for source, write in self._pipes:
            while data := _read(source):
                write(data)

    def close(self) -> None:
        """Copies the remaining output, and closes the pipes."""
        self.pass_on()
        self._pipes.clear()
        self._ends.close()


def _read(source: int) -> bytes:
    try:
        return os.read(source, 1 << 16)
    except BlockingIOError:  # the pipe is empty
        return b""


def prints_elsewhere() -> bool:
    """Whether `sys.stdout` or `sys.stderr` differs from the descriptor that a child process would inherit."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) != (1, 2)
    except (AttributeError, OSError, ValueError):  # not backed by a file descriptor
        return True
