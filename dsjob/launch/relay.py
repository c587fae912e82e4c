"""Relays the output of rank 0 if this process does not print to its own file descriptors, as in a notebook or test."""

from __future__ import annotations

import codecs
import os
import sys
from typing import TextIO


class Relay:
    """Two pipes for rank 0's `stdout` and `stderr`. `pass_on` copies their contents to `sys.stdout` and `sys.stderr`.

    The thread that waits for the ranks calls `pass_on`, because a notebook shows a thread's output in the cell that
    started it. Reads never block: processes that rank 0 has started may keep a pipe open after the run.
    """

    def __init__(self) -> None:
        self._streams: list[tuple[int, TextIO, codecs.IncrementalDecoder]] = []
        self.stdout, self.stderr = self._open(sys.stdout), self._open(sys.stderr)

    def _open(self, stream: TextIO) -> int:
        source, end = os.pipe()
        os.set_blocking(source, False)
        self._streams.append((source, stream, codecs.getincrementaldecoder("utf-8")("replace")))
        return end

    def begin(self) -> None:
        """Closes this process's copies of the write ends, once the rank has inherited them."""
        os.close(self.stdout)
        os.close(self.stderr)

    def pass_on(self) -> None:
        """Prints the output since the last call."""
        for source, stream, decoder in self._streams:
            while data := _read(source):
                # The decoder keeps an incomplete character until its other bytes arrive.
                stream.write(decoder.decode(data))
                stream.flush()

    def close(self) -> None:
        """Prints the remaining output, and closes the pipes."""
        self.pass_on()
        for source, _, _ in self._streams:
            os.close(source)


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
