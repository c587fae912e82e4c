"""What all sources are turned into: values for keys of the job document with where they come from, and notes."""

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
UNKNOWN = "fill in"  # an argument that no call accepts, until somebody has filled it in
SHELL = "the shell knows what that is"
LATER = ": it is given later"
UNSAID = object()
_SECRET = re.compile(r"token(?!s|iz)|secret|password|api_?key", re.IGNORECASE)
TRUE, FALSE = ("yes", "true", "t", "y", "1", "on"), ("no", "false", "f", "n", "0", "off")
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
    said: Any = UNSAID  # the source's own words, where `value` is what they mean in a job document

    def __str__(self) -> str:
        return f"{self.told} ({self.place})" if self.place else self.told

    @property
    def told(self) -> str:
        """Name and value as notes print them: one line, as the source has them, secrets left out."""
        said = self.value if self.said is UNSAID else self.said
        return f"{self.name}={'...' if _SECRET.search(self.name) else show(said)}"

    @property
    def is_open(self) -> bool:
        """Whether the shell would fill in a part of it."""
        return self.rank == Rank.COMMAND_LINE and is_open(self.value if self.said is UNSAID else self.said)

    @property
    def source(self) -> str:
        """The file that it is in."""
        return re.sub(r"(:\d+)+$", "", self.place)

    def problem(self, message: str, *, path: Path = (), rule: str = "type", hint: str = "") -> Problem:
        """What is wrong with it, at its place."""
        match = re.fullmatch(r"(.*):(\d+):(\d+)", self.place, re.DOTALL)
        source, line, column = (match[1], int(match[2]), int(match[3])) if match else (self.place, 0, 0)
        found = Problem(message, path, rule, hint, source, line, column)
        return found if found.dotted == self.name else replace(found, message=f"{self.told}: {message}")

    def to(self, value: Any) -> Given:
        """The same origin with what the value means in a job document."""
        return replace(self, value=value, said=self.value if self.said is UNSAID else self.said)

    def as_default(self, value: Any) -> Given:
        """A value that follows from this one unless somebody says otherwise."""
        return replace(self.to(value), rank=Rank.DEFAULT)


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
    """What the sources say so far: every value given for a path of the job document, the notes, and what is wrong."""

    values: dict[Path, list[Given]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: dict[tuple[str, str], Problem] = field(default_factory=dict)  # the first of each given value
    unfilled: set[Path] = field(default_factory=set)  # placeholders that `validate` refuses until they are filled in
    nodes: int | None = 1  # machines; None where they are not known
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
        """Adds what is wrong with a value, an error of the import; what the shell would fill in is to be filled in."""
        if given.is_open:
            self.note("fill in", f"{given.told}: {SHELL}", given)
            return
        if (given.place, given.name) not in self.problems:
            found = given.problem(message, path=path, rule=rule, hint=hint)
            self.problems[given.place, given.name] = found

    def number(self, given: Given, otherwise: float = 0) -> float:
        """The value as a number; one that is none is refused, and `otherwise` stands for it."""
        if isinstance(given.value, (int, float)) and not isinstance(given.value, bool) and math.isfinite(given.value):
            return given.value
        self.refuse(given, "must be a number")
        return otherwise

    def whole(self, given: Given, least: int = 0) -> int:
        """The value as an integer of at least `least`; any other is refused, and `least` stands for it."""
        value = self.number(given, least)
        if value == int(value) and value >= least:
            return int(value)
        self.refuse(given, f"must be a whole number, at least {least}")
        return least

    def switch(self, given: Given) -> bool:
        """Whether a switch is on, in any of its spellings; what is no switch is refused."""
        word = str(given.value).lower()
        if given.value is None or word in FALSE or word == "":
            return False
        if word not in TRUE:
            self.refuse(given, "must be true or false")
        return word in TRUE

    def best(self, path: str) -> Given | None:
        """The value that wins at a path so far; "auto" and defaults aside, None where there is none."""
        found = [g for g in self.values.get(tuple(path.split(".")), ()) if g.value != "auto" and g.rank > Rank.DEFAULT]
        return pick(found) if found else None


def pick(found: list[Given]) -> Given:
    """The winner: the highest rank, and of equals the one given last."""
    return max(enumerate(found), key=lambda item: (item[1].rank, item[0]))[1]


def join(settings: Settings, more: Iterable[tuple[str, Given]], draft: Draft) -> None:
    """Adds settings that win over those that are there, and notes where they differ."""
    for name, given in more:
        before = settings.get(name)
        if before is not None and given.value is None:
            continue  # a dump has null where nothing was given
        if before is not None and before.value != given.value and not is_off(before.value):
            draft.note("conflict", f"{name}: {given} wins over {before}{'' if given.rank > before.rank else LATER}")
        settings[name] = given


def show(value: Any) -> str:
    """A value as a note prints it: as JSON has it, without secrets; text as it is."""
    return cut(value) if isinstance(value, str) else shorten(_hide(value), as_json=True)


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "..." if _SECRET.search(str(key)) else _hide(item) for key, item in value.items()}
    return [_hide(item) for item in value] if isinstance(value, list) else value


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing, in any of the spellings of switches."""
    if isinstance(value, dict):
        return all(is_off(item) for item in value.values())
    return value in (None, False, "", "no", "none", "None", "NO", "False", "false") or value == []


def is_open(value: Any) -> bool:
    """Whether a value has something in it that the shell would fill in."""
    return isinstance(value, str) and re.search(r"\$\w|\$\(|`", value) is not None


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
