"""The output of rank 0 where this process prints to something other than its own descriptors: a notebook, a test."""

from __future__ import annotations

import codecs
import os
import sys
from typing import TextIO


class Relay:
    """Two pipes: what rank 0 writes to `stdout` and `stderr` goes to `sys.stdout` and `sys.stderr` with each `pass_on`.

    It is called on the thread that waits for the ranks, since a notebook shows what a thread prints in the thread's
    own cell. A pipe is read without waiting: what rank 0 has started may keep it open for longer than the run.
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
        """The rank has its ends of the pipes: this process closes them."""
        os.close(self.stdout)
        os.close(self.stderr)

    def pass_on(self) -> None:
        """Prints what has come in the meantime."""
        for source, stream, decoder in self._streams:
            while data := _read(source):
                stream.write(decoder.decode(data))
                stream.flush()

    def close(self) -> None:
        """Prints the rest, and closes the pipes."""
        self.pass_on()
        for source, _, _ in self._streams:
            os.close(source)


def _read(source: int) -> bytes:
    try:
        return os.read(source, 1 << 16)
    except BlockingIOError:  # nothing there
        return b""


def prints_elsewhere() -> bool:
    """Whether `sys.stdout` or `sys.stderr` is not the descriptor that a child process would write to."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) != (1, 2)
    except (AttributeError, OSError, ValueError):  # no file at all
        return True
