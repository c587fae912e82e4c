"""Writes text to terminals and logs, and quotes words for shells. Everything that dsjob prints goes through here.

Names, paths, messages of exceptions and texts may come from anyone. Control characters in them would move a terminal's
cursor, recolour it or change its title; those that change the direction of text make a line look like another one; a
newline makes one line two. All of them are shown as escapes, in the notation of Python. `tests/test_terminal.py` checks
that no other module prints, and that commands in messages are quoted.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

# Characters that `str.isprintable` does not count, but texts in many languages need: spaces, and what joins letters.
_OF_TEXTS = frozenset("\t\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}\N{SOFT HYPHEN}\u200c\u200d")
_INDENT = "  "


def make_printable(text: str) -> str:
    """`text` on one line; control characters and those that change the direction of text become escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return ascii(character)[1:-1]


def split_text(text: str, *, indented: bool = True) -> list[str]:
    """The lines of a message or another text that may have several, printable.

    indented: all but the first, so that none of them looks like a line of dsjob's own.
    """
    first, *rest = (
        line if line.isprintable() else "".join(c if c.isprintable() or c in _OF_TEXTS else _escape(c) for c in line)
        for line in text.split("\n")
    )
    return [first, *(_INDENT + line if indented and line and not line.startswith(_INDENT) else line for line in rest)]


def format_text(text: str) -> str:
    """A text with the lines of `split_text`, each with its newline."""
    return "\n".join(split_text(text.removesuffix("\n"))) + "\n"


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Prints lines to standard output, or to `file`. A newline inside a line is shown as an escape."""
    _print(map(make_printable, lines), file)


def print_block(text: str, file: TextIO | None = None) -> None:
    """Prints a text whose newlines are dsjob's own, such as JSON, or a table of printable cells."""
    print_lines(*text.removesuffix("\n").split("\n"), file=file)


def print_text(text: str, file: TextIO | None = None, *, indented: bool = True) -> None:
    """Prints a text that may have several lines, such as a message; see `split_text`."""
    _print(split_text(text, indented=indented), file)


def format_traceback(error: BaseException) -> list[str]:
    """The lines of an error's traceback, as Python prints it. Those of its text are as in `split_text`."""
    from traceback import TracebackException  # not at the start of every command

    parts = TracebackException.from_exception(error).format()
    return [line for part in parts for line in split_text(part.removesuffix("\n"))]


def print_traceback(error: BaseException) -> None:
    """Prints an error's traceback to standard error."""
    _print(format_traceback(error), sys.stderr)


def print_error(text: str) -> None:
    """Prints a message, which may have several lines, to standard error."""
    print_text(text, sys.stderr)


def _print(lines: Iterable[str], file: TextIO | None) -> None:
    # Flushed, because errors and output go to different streams, and would change places in a shared log.
    print(*lines, sep="\n", file=file, flush=True)


def write_now(text: str, *, indented: bool = True) -> None:
    """Writes a message to descriptor 2, without Python's buffers: for threads and signal handlers, which must not wait
    for whoever holds those. See `split_text`."""
    os.write(2, ("\n".join(split_text(text, indented=indented)) + "\n").encode(errors="backslashreplace"))


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """`warnings.warn`, for a text that may contain names from outside."""
    warnings.warn("\n".join(split_text(text)), category, stacklevel=stacklevel + 1)


@contextmanager
def printable_output() -> Iterator[None]:
    """Prints what another library has printed while the block ran, after it."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            yield
        finally:
            texts = output.getvalue(), errors.getvalue()
    for text, file in zip(texts, (sys.stdout, sys.stderr), strict=True):
        if text:
            print_text(text.removesuffix("\n"), file, indented=False)


@contextmanager
def printable_warnings() -> Iterator[None]:
    """Shows warnings of any library with printable texts while the block runs."""
    usual = warnings.formatwarning

    def form(*arguments: Any, **options: Any) -> str:
        return format_text(usual(*arguments, **options))

    warnings.formatwarning = form
    try:
        yield
    finally:
        warnings.formatwarning = usual


def quote_word(word: str) -> str:
    """A word of a command that a user may paste into a shell."""
    if word.isprintable():
        return shlex.quote(word)
    # bash, zsh, ksh and dash's successors know $'...'. Three octal digits for each byte: nothing after them adds to it.
    escaped = (
        f"\\{c}" if c in "\\'" else c if c.isprintable() else "".join(f"\\{byte:03o}" for byte in _encode(c))
        for c in word
    )
    return f"$'{''.join(escaped)}'"


def _encode(character: str) -> bytes:
    """As the system stores it in a name."""
    return character.encode(errors="surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass")


def quote_path(path: str) -> str:
    """A path as a word of a command of dsjob's, which takes `-x` for a flag, and `+x` and `~x` for changes."""
    return quote_word(f"./{path}" if re.match(r"[-+~]", path) else path)
