"""Masks streams of text that arrive in pieces, and a program that does so for the output of another process.

What could be the beginning of a text to mask is held back until the next piece shows what it is. The program is run as
a file, and needs the standard library alone. See `dsjob.contract.masked_output`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import sys
import termios
from collections.abc import Iterable, Sequence

_HIDDEN = "***"
_BLOCK = 1 << 16


class Mask:
    """Masks a stream. texts: those to mask, as they are written in it."""

    def __init__(self, texts: Iterable[str], held: str = "") -> None:
        self.held = held
        self._texts = sorted(texts, key=len, reverse=True)  # where one begins with another, the longer one counts
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def mask(self, text: str) -> str:
        """A whole text, masked."""
        return self._pattern.sub(_HIDDEN, text)

    def add(self, piece: str) -> str:
        """What to show after the next piece of the stream has arrived."""
        text, end = self.held + piece, 0
        shown = []
        for found in self._pattern.finditer(text):
            shown += [text[end : found.start()], _HIDDEN]
            end = found.end()
        begin = self._find_beginning(text, end)
        self.held = text[begin:]
        return "".join([*shown, text[end:begin]])

    def end(self) -> str:
        """What was held back, at the end of the stream."""
        held, self.held = self.held, ""
        return held

    def _find_beginning(self, text: str, start: int) -> int:
        """Where the end of a text begins that may be the beginning of one to mask."""
        found = len(text)
        for each in self._texts:
            at = text.find(each[0], max(start, len(text) - len(each) + 1), found)
            while at >= 0:
                if each.startswith(text[at:]):
                    found = at
                    break
                at = text.find(each[0], at + 1, found)
        return found


class _Source:
    """A descriptor that is read, and where it goes."""

    def __init__(self, descriptor: int, target: int) -> None:
        self._descriptor, self._target, self._mask = descriptor, target, Mask(())

    def pass_on(self) -> bool:
        """Passes on what has arrived. False at the end."""
        try:
            data = os.read(self._descriptor, _BLOCK)
        except OSError:  # EIO: all who could write to the terminal have ended
            data = b""
        shown = self._mask.add(data.decode("latin-1")) if data else self._mask.end()
        left = shown.encode("latin-1")
        try:
            while left:
                left = left[os.write(self._target, left) :]
        except OSError:  # nobody reads it any more, which those who write learn in the same way
            data = b""
        if not data:
            os.close(self._descriptor)
        return bool(data)

    def renew(self, texts: Sequence[str]) -> None:
        self._mask = Mask(texts, self._mask.held)

    def resize(self) -> None:
        copy_size(self._target, self._descriptor)


def copy_size(terminal: int, other: int) -> None:
    """Gives a terminal the size of another one; nothing if it is not one."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(other, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))


def to_bytes(text: str) -> str:
    """How a text is written to a descriptor, with one character for each byte."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def run_filter(pairs: Sequence[tuple[int, int]]) -> None:
    """Copies each source to its target until all have ended, and masks the texts that standard input names."""
    # It ends when nobody can write any more, and not before: signals are meant for those who write.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    sources = {source: _Source(source, target) for source, target in pairs}

    def resize(*_: object) -> None:
        for each in list(sources.values()):
            each.resize()

    signal.signal(signal.SIGWINCH, resize)
    told, control = b"", 0
    waiting = [control, *sources]
    while waiting != [control] and waiting:
        ready = select.select(waiting, (), ())[0]
        if control in ready:  # first: what follows in the output may be a text that it names
            data = os.read(control, _BLOCK)
            *lines, told = (told + data).split(b"\n")
            for line in lines:
                for each in sources.values():
                    each.renew(json.loads(line))
            if not data:
                waiting.remove(control)
            continue
        for descriptor in ready:
            if not sources[descriptor].pass_on():
                waiting.remove(descriptor)
                del sources[descriptor]


if __name__ == "__main__":
    run_filter(json.loads(sys.argv[1]))
