"""Masks secret values in all that a process and its child processes print.

`watch_output` replaces `sys.stdout` and `sys.stderr` and, once there is something to mask, file descriptors 1 and 2.
They then lead to a process of its own (`dsjob.contract.output_filter`), which masks what arrives and passes it on: also
the output of native code and of child processes, and the last words of a process that crashes. Where the output was a
terminal, it still is one (a pty), so that progress bars look as before.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from dsjob.contract import masking, output_filter

if TYPE_CHECKING:
    import subprocess

_PATIENCE = 2.0  # seconds to wait for the last output: a child process may go on and keep it open


class _Masked:
    """A text stream that masks what is written to it, and otherwise behaves like the stream that it wraps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._mask = output_filter.Mask(masking.list_spellings())
        masking.watch(self._renew)

    def write(self, text: str) -> int:
        self._stream.write(self._mask.add(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def end(self) -> None:
        """Writes what was held back."""
        masking.unwatch(self._renew)
        if held := self._mask.end():
            self._stream.write(held)

    def _renew(self) -> None:
        self._mask = output_filter.Mask(masking.list_spellings(), self._mask.held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Diversion:
    """Leads file descriptors 1 and 2 of this process through another one that masks."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._saved: dict[int, int] = {}  # where the descriptors led before
        self._filter: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Begins, or names new texts to mask. Does nothing as long as there are none."""
        texts = sorted(map(output_filter.to_bytes, masking.list_spellings()))
        if not texts or os.getpid() != self._owner:
            return
        self._filter = self._filter or self._divert()
        if self._filter.stdin is not None:
            with contextlib.suppress(OSError):  # it was killed, which the next output shows
                self._filter.stdin.write(json.dumps(texts).encode() + b"\n")
                self._filter.stdin.flush()

    def end(self) -> None:
        """Leads the descriptors back, and waits until all output has arrived."""
        if self._filter is None or os.getpid() != self._owner:  # a fork leaves this to its parent
            return
        for descriptor, saved in self._saved.items():
            os.dup2(saved, descriptor)
            os.close(saved)
        import subprocess

        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._filter.communicate(timeout=_PATIENCE)
        self._filter, self._saved = None, {}

    def _divert(self) -> subprocess.Popen[bytes]:
        import subprocess  # not at the start of every command

        _flush()
        ends: dict[tuple[int, int], int] = {}  # by file: what is written in order arrives in order
        pairs = []
        for descriptor in (1, 2):
            try:
                found = os.fstat(descriptor)
            except OSError:  # it is closed
                continue
            saved = self._saved[descriptor] = os.dup(descriptor)
            file = (found.st_dev, found.st_ino)
            if file not in ends:
                source, ends[file] = _open_terminal(saved) if os.isatty(saved) else os.pipe()
                pairs.append((source, saved))
            os.dup2(ends[file], descriptor)
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", output_filter.__file__, json.dumps(pairs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._saved.get(2, subprocess.DEVNULL),
            pass_fds=[each for pair in pairs for each in pair],
        )
        for each in (*ends.values(), *(source for source, _ in pairs)):
            os.close(each)
        return started


def _open_terminal(terminal: int) -> tuple[int, int]:
    """A terminal like another one: where to read what is written to it, and where to write."""
    import termios

    source, end = os.openpty()
    modes = termios.tcgetattr(end)
    modes[1] &= ~termios.OPOST  # the other one makes \\r\\n of \\n
    termios.tcsetattr(end, termios.TCSANOW, modes)
    output_filter.copy_size(terminal, source)
    return source, end


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


_diversion: _Diversion | None = None


@contextlib.contextmanager
def watch_output(*, descriptors: bool = True) -> Iterator[None]:
    """Masks what this process writes to standard output and error while the block runs. descriptors: also what native
    code and child processes write; False for a process whose output another one masks."""
    global _diversion
    before = sys.stdout, sys.stderr
    masked = _Masked(sys.stdout), _Masked(sys.stderr)
    sys.stdout, sys.stderr = masked
    diversion = _Diversion() if descriptors and _diversion is None else None
    if diversion is not None:
        _diversion = diversion
        masking.watch(diversion.begin)
        diversion.begin()
    try:
        yield
    finally:
        for stream in masked:
            stream.end()
        if diversion is not None:
            masking.unwatch(diversion.begin)
            end_output()
        sys.stdout, sys.stderr = before


def end_output() -> None:
    """Waits until all output has arrived: for a process that ends without leaving `watch_output`."""
    global _diversion
    _flush()
    if _diversion is not None:
        _diversion.end()
        _diversion = None
