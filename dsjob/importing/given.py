"""The common form of all sources: values for keys of the job document with their origins, and notes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, get_args

from dsjob.contract.paths import Path
from dsjob.contract.shown import cut, shorten
from dsjob.errors import Problem

Kind = Literal["fill in", "mend", "conflict", "not supported", "unknown", "left out", "changed", "auto"]
KINDS: tuple[Kind, ...] = get_args(Kind)
UNKNOWN = "fill in"  # a placeholder value that no call accepts, until the user has replaced it
SHELL = "only the shell knows this value"
LATER = ": it comes later"
UNSAID = object()
_SECRET = re.compile(r"token(?!s|iz)|secret|password|api_?key", re.IGNORECASE)
TRUE, FALSE = ("yes", "true", "t", "y", "1", "on"), ("no", "false", "f", "n", "0", "off")
MODULE = "my_module"  # the module that placeholders name, for code that was in the user's program


class Rank(IntEnum):
    """The priority of a source: of two values, the one with the higher rank is used."""

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
    said: Any = UNSAID  # the value as it is in the source, if `value` is its translation for a job document

    def __str__(self) -> str:
        return f"{self.label} ({self.place})" if self.place else self.label

    @property
    def label(self) -> str:
        """Name and value for notes: on one line, as they are in the source, without secrets."""
        said = self.value if self.said is UNSAID else self.said
        return f"{self.name}={'...' if _SECRET.search(self.name) else show(said)}"

    @property
    def is_open(self) -> bool:
        """Whether it contains something that only the shell can fill in."""
        return self.rank == Rank.COMMAND_LINE and is_open(self.value if self.said is UNSAID else self.said)

    @property
    def source(self) -> str:
        """The file that it comes from."""
        return re.sub(r"(:\d+)+$", "", self.place)

    def problem(self, message: str, *, path: Path = (), rule: str = "type", hint: str = "") -> Problem:
        """A problem with this value, at its place."""
        match = re.fullmatch(r"(.*):(\d+):(\d+)", self.place, re.DOTALL)
        source, line, column = (match[1], int(match[2]), int(match[3])) if match else (self.place, 0, 0)
        found = Problem(message, path, rule, hint, source, line, column)
        return found if found.dotted == self.name else replace(found, message=f"{self.label}: {message}")

    def to(self, value: Any) -> Given:
        """A copy with the value translated for a job document, and the same origin."""
        return replace(self, value=value, said=self.value if self.said is UNSAID else self.said)

    def as_default(self, value: Any) -> Given:
        """A copy with another value and the rank of a default, so that any given value overrides it."""
        return replace(self.to(value), rank=Rank.DEFAULT)


Settings = dict[str, Given]


@dataclass(frozen=True, slots=True)
class Note:
    """A note for the user on the job document; `place` is the file and line that it is about."""

    kind: Kind
    message: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.place}: {self.message}" if self.place else f"{self.kind}: {self.message}"


@dataclass
class Draft:
    """The state of an import: all values given for each path of the job document, the notes, and the problems."""

    values: dict[Path, list[Given]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: dict[tuple[str, str], Problem] = field(
        default_factory=dict
    )  # by place and name: only the first of each value
    unfilled: set[Path] = field(default_factory=set)  # placeholders that `validate` refuses until they are filled in
    nodes: int | None = 1  # number of machines; None if unknown
    _known: set[Note] = field(default_factory=set)

    def put(self, path: str | Path, given: Given) -> None:
        """Adds a value for a path, dotted or in parts."""
        self.values.setdefault(tuple(path.split(".")) if isinstance(path, str) else path, []).append(given)

    def note(self, kind: Kind, message: str, given: Given | None = None) -> None:
        """Adds a note, once."""
        note = Note(kind, message, given.place if given else "")
        if note not in self._known:
            self._known.add(note)
            self.notes.append(note)

    def refuse(self, given: Given, message: str, *, path: Path = (), rule: str = "type", hint: str = "") -> None:
        """Adds a problem with a value, which makes the import fail. A value that only the shell knows becomes a note to
        fill it in instead."""
        if given.is_open:
            self.note("fill in", f"{given.label}: {SHELL}", given)
            return
        if (given.place, given.name) not in self.problems:
            found = given.problem(message, path=path, rule=rule, hint=hint)
            self.problems[given.place, given.name] = found

    def number(self, given: Given, otherwise: float = 0) -> float:
        """The value as a number; refuses any other value, and returns `otherwise` instead."""
        if isinstance(given.value, (int, float)) and not isinstance(given.value, bool) and math.isfinite(given.value):
            return given.value
        self.refuse(given, "must be a number")
        return otherwise

    def whole(self, given: Given, least: int = 0) -> int:
        """The value as an integer of at least `least`; refuses any other value, and returns `least` instead."""
        value = self.number(given, least)
        if value == int(value) and value >= least:
            return int(value)
        self.refuse(given, f"must be an integer, at least {least}")
        return least

    def switch(self, given: Given) -> bool:
        """The value of a switch, in any of its spellings; refuses any other value."""
        word = str(given.value).lower()
        if given.value is None or word in FALSE or word == "":
            return False
        if word not in TRUE:
            self.refuse(given, "must be true or false")
        return word in TRUE

    def best(self, path: str) -> Given | None:
        """The value with the highest rank at a path so far, ignoring "auto" and defaults; None if there is none."""
        found = [g for g in self.values.get(tuple(path.split(".")), ()) if g.value != "auto" and g.rank > Rank.DEFAULT]
        return pick(found) if found else None


def pick(found: list[Given]) -> Given:
    """The value with the highest rank; among equals, the one given last."""
    return max(enumerate(found), key=lambda item: (item[1].rank, item[0]))[1]


def join(settings: Settings, more: Iterable[tuple[str, Given]], draft: Draft) -> None:
    """Adds settings that override existing ones, with notes on differences."""
    for name, given in more:
        before = settings.get(name)
        if before is not None and given.value is None:
            continue  # a dump contains null for arguments that were not set
        if before is not None and before.value != given.value and not is_off(before.value):
            draft.note("conflict", f"{name}: {given} overrides {before}{'' if given.rank > before.rank else LATER}")
        settings[name] = given


def show(value: Any) -> str:
    """A value for a note: as JSON without secrets; text as it is."""
    return cut(value) if isinstance(value, str) else shorten(_hide(value), as_json=True)


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "..." if _SECRET.search(str(key)) else _hide(item) for key, item in value.items()}
    return [_hide(item) for item in value] if isinstance(value, list) else value


def is_off(value: Any) -> bool:
    """Whether a value means "off" or "not set", in any spelling."""
    if isinstance(value, dict):
        return all(is_off(item) for item in value.values())
    return value in (None, False, "", "no", "none", "None", "NO", "False", "false") or value == []


def is_open(value: Any) -> bool:
    """Whether a value contains something that only the shell can fill in."""
    return isinstance(value, str) and re.search(r"\$\w|\$\(|`", value) is not None


def differs(value: Any, default: Any) -> bool:
    """Whether a value differs from the default, whatever their spellings."""
    return bool(value != default) and not (is_off(value) and is_off(default))


def leaves(value: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Paths and values of everything that is not an object."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key), item


def nest(path: Path, value: Any) -> dict[str, Any]:
    """An object that only contains `value` at `path`."""
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested
