"""Positions in the text of a document, the parsed document, and the base class of the readers of both formats."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dsjob.contract.bounds import MAX_DEPTH
from dsjob.contract.shown import shorten
from dsjob.errors import MAX_PROBLEMS, DocumentError, Problem

KeyPath = tuple[str | int, ...]

MAX_NUMBER: Final = 250  # characters of a number: then every integer also fits a float
MAX_EXPANSION: Final = 200_000  # values and characters that YAML aliases may add to a document


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in the text: 1-based line and column, in characters. Lines end with `\\n`."""

    line: int
    column: int


class _Marks(Mapping[KeyPath, Mark]):
    """A mapping from paths to marks that converts offsets lazily, since few marks are ever read."""

    def __init__(self, offsets: dict[KeyPath, int], line_starts: list[int]) -> None:
        self._offsets = offsets
        self._line_starts = line_starts

    def __getitem__(self, path: KeyPath) -> Mark:
        return make_mark(self._line_starts, self._offsets[path])

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)


@dataclass(frozen=True)
class Document:
    """A parsed document. Values from YAML aliases and merges have the position of their anchor."""

    source: str  # what to call it in messages: a path, a URL or "<stdin>"
    value: dict[str, Any]
    keys: Mapping[KeyPath, Mark]  # where each key or list item starts
    values: Mapping[KeyPath, Mark]  # where each value starts; () is the root
    text: str  # without a byte order mark, lines ended by "\n": text.split("\n")[mark.line - 1] is the marked line
    duplicates: tuple[Problem, ...] = ()  # a problem for each duplicate key; which of its values is used is undefined

    def mark(self, path: Sequence[str | int]) -> Mark:
        """The position of the key at `path`, or of its nearest existing ancestor."""
        for length in range(len(path), 0, -1):
            if (found := self.keys.get(tuple(path[:length]))) is not None:
                return found
        return self.values[()]

    def locate(self, path: Sequence[str | int]) -> tuple[str, int, int]:
        """The source, line and column of `mark`."""
        mark = self.mark(path)
        return self.source, mark.line, mark.column


def find_hint(table: tuple[tuple[str, str], ...], text: str) -> str:
    return next((hint for pattern, hint in table if re.search(pattern, text)), "")


def make_mark(line_starts: list[int], at: int) -> Mark:
    line = bisect_right(line_starts, at)
    return Mark(line, at - line_starts[line - 1] + 1)


class Reader:
    """The base of both readers: the text, the positions found so far, and functions for errors."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.line_starts = [0, *(newline.end() for newline in re.finditer("\n", text))]
        self.key_at: dict[KeyPath, int] = {}
        self.value_at: dict[KeyPath, int] = {}
        self.duplicates: dict[int, Problem] = {}  # by the offset of the second key

    def line(self, at: int) -> int:
        return make_mark(self.line_starts, at).line

    def problem(self, at: int, message: str, hint: str, rule: str, path: KeyPath = ()) -> Problem:
        mark = make_mark(self.line_starts, at)
        return Problem(message, path, rule, hint, self.source, mark.line, mark.column)

    def fail(self, at: int, message: str, hint: str = "", rule: str = "syntax") -> DocumentError:
        return DocumentError([self.problem(at, message, hint, rule)])

    def require_depth(self, at: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self.too_deep(at)

    def too_deep(self, at: int) -> DocumentError:
        return self.fail(at, f"nested deeper than {MAX_DEPTH} levels", rule="too-deep")

    def add_duplicate(self, path: KeyPath, first: int, second: int) -> None:
        if len(self.duplicates) > MAX_PROBLEMS:
            return
        lines = f"first on line {self.line(first)}, again on line {self.line(second)}"
        message = f"the key {shorten(path[-1], as_json=True)} is given twice: {lines}"
        found = self.problem(second, message, "keep one of them", "duplicate-key", path)
        self.duplicates.setdefault(second, found)  # setdefault, since a YAML mapping is read again at each alias

    def not_an_object(self, at: int, but: str) -> DocumentError:
        hint = 'JSON looks like { "key": value }, YAML like key: value'
        return self.fail(at, f"a document must be one object, this one {but}", hint, "not-an-object")

    def number(self, at: int, text: str, convert: Callable[[str], int | float]) -> int | float:
        if len(text) > MAX_NUMBER:
            raise self.fail(at, f"a number of {len(text):,} characters is too long", rule="number")
        value = convert(text)
        if not math.isfinite(value):
            hint = "a document has JSON's numbers: write null, or omit the key"
            raise self.fail(at, f"{text} is not a finite 64-bit float", hint, "number")
        return value

    def finish(self, value: dict[str, Any]) -> Document:
        keys, values = _Marks(self.key_at, self.line_starts), _Marks(self.value_at, self.line_starts)
        return Document(self.source, value, keys, values, self.text, tuple(self.duplicates.values()))
