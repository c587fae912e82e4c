"""What all sources are turned into: values for keys of the job document with where they come from, and notes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

from dsjob.errors import DocumentError, Problem
from dsjob.paths import Path

Kind = Literal["fill in", "conflict", "not supported", "unknown", "left out", "changed", "auto"]
KINDS: tuple[Kind, ...] = ("fill in", "conflict", "not supported", "unknown", "left out", "changed", "auto")
PRECEDENCE = "command line > Trainer arguments > accelerate > DeepSpeed"
UNKNOWN = "fill in"  # an argument that no call accepts, until somebody has filled it in
_SECRET = re.compile(r"token|secret|password|api_?key", re.IGNORECASE)
MODULE = "my_module"  # what placeholders name: code that only a Python program had


class Rank(IntEnum):
    """Which of two values wins: the higher one."""

    DEFAULT = 0
    DEEPSPEED = 1
    ACCELERATE = 2
    ARGUMENTS = 3
    COMMAND_LINE = 4


@dataclass(frozen=True, slots=True)
class Given:
    """A value with its name in its source, and `file:line:column` (or the words "command line")."""

    value: Any
    name: str
    place: str
    rank: Rank

    def __str__(self) -> str:
        return f"{self.told} ({self.place})" if self.place else self.told

    @property
    def told(self) -> str:
        """Name and value as notes print them: one line, secrets left out."""
        return f"{self.name}={'...' if _SECRET.search(self.name) else show(self.value)}"

    def number(self) -> float:
        """The value as a number. Raises DocumentError, naming the place, where it is none."""
        if isinstance(self.value, (int, float)) and not isinstance(self.value, bool):
            return self.value
        raise self.wrong("must be a number")

    def wrong(self, message: str) -> DocumentError:
        """What to raise for a value that cannot be meant."""
        match = re.fullmatch(r"(.*):(\d+):(\d+)", self.place)
        source, line, column = (match[1], int(match[2]), int(match[3])) if match else (self.place, 0, 0)
        return DocumentError([Problem(f"{self.told}: {message}", (), "type", "", source, line, column)])

    def to(self, value: Any) -> Given:
        """The same origin with what the value means in a job document."""
        return replace(self, value=value)

    def as_default(self, value: Any) -> Given:
        """A value that follows from this one unless somebody says otherwise."""
        return replace(self, value=value, rank=Rank.DEFAULT)


Settings = dict[str, Given]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a user has to know about the job document; `place` is where it comes from."""

    kind: Kind
    message: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.place}: {self.message}" if self.place else f"{self.kind}: {self.message}"


@dataclass
class Draft:
    """What the sources say so far: every value given for a path of the job document, and the notes."""

    values: dict[Path, list[Given]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    unfilled: set[Path] = field(default_factory=set)  # placeholders that `validate` refuses until they are filled in

    def put(self, path: str | Path, given: Given) -> None:
        """Adds a value for a path, dotted or in parts."""
        self.values.setdefault(tuple(path.split(".")) if isinstance(path, str) else path, []).append(given)

    def note(self, kind: Kind, message: str, given: Given | None = None) -> None:
        """Adds a note, once."""
        note = Note(kind, message, given.place if given else "")
        if note not in self.notes:
            self.notes.append(note)

    def best(self, path: str) -> Given | None:
        """The value that wins at a path so far; "auto" and defaults aside, None where there is none."""
        found = [g for g in self.values.get(tuple(path.split(".")), ()) if g.value != "auto" and g.rank > Rank.DEFAULT]
        return pick(found) if found else None


def pick(found: list[Given]) -> Given:
    """The winner: the highest rank, and of equals the one given last."""
    return max(enumerate(found), key=lambda item: (item[1].rank, item[0]))[1]


def show(value: Any) -> str:
    """A value as a note prints it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing, in any of the spellings of switches."""
    if isinstance(value, dict):
        return all(is_off(item) for item in value.values())
    return value in (None, False, "", "no", "none", "None", "NO", "False", "false") or value == []


def differs(value: Any, default: Any) -> bool:
    """Whether a value says something else than the default, however that is spelt."""
    return bool(value != default) and not (is_off(value) and is_off(default))


def leaves(value: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Paths and values of all that is no object."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key), item


def nest(path: Path, value: Any) -> dict[str, Any]:
    """An object with nothing but `value` at `path`."""
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested
