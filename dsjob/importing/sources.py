"""Reads the files for `dsjob import`, and detects their types from their content."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from dsjob import document as documents
from dsjob import storage
from dsjob.contract import schema as contract
from dsjob.contract.paths import Path
from dsjob.contract.trainer_arguments import ARGUMENTS, SCRIPT_ARGUMENTS
from dsjob.document import Document
from dsjob.document.origins import STDIN, read_text
from dsjob.errors import DocumentError, Problem, UsageError
from dsjob.importing import accelerate, determined
from dsjob.importing.command_line import Command, find_commands
from dsjob.terminal import quote_path

SourceKind = Literal["deepspeed", "arguments", "command", "accelerate", "determined"]
SOURCE_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)
_WORDS = {
    "deepspeed": "a DeepSpeed config",
    "arguments": "Trainer arguments",
    "command": "a launch command",
    "accelerate": "an accelerate file",
    "determined": "an experiment of Determined",
}
MAX_COMMAND = 1 << 20  # characters of a script that starts a training
_SUFFIXES = (".json", ".jsonc", ".hjson", ".yaml", ".yml")
_LAUNCHES = re.compile(
    r"^[^#\n]*\b(?:deepspeed|torchrun|accelerate\s+launch|python[\d.]*)\s+\S|^[^#\n{]*\s--\w", re.MULTILINE
)


@dataclass(frozen=True)
class Source:
    """A file, its type, and its contents: a `document`, or a launch command."""

    kind: SourceKind
    name: str
    document: Document | None = None
    command: Command | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The object in the file."""
        return self.document.value if self.document else {}

    def locate(self, path: Path) -> str:
        """`file:line:column` of the key at a path."""
        assert self.document is not None
        mark = self.document.mark(path)
        return f"{self.name}:{mark.line}:{mark.column}"


def read_sources(urls: list[str], kind: SourceKind | None = None) -> tuple[list[Source], list[Problem]]:
    """The files that can be read, and the problems of the others."""
    found: list[Source] = []
    wrong: list[Problem] = []
    for url in urls:
        try:
            found.append(read_source(url, kind))
        except DocumentError as error:
            wrong += error.problems
        except UsageError as error:
            name = STDIN if url == "-" else url
            wrong.append(Problem(error.message, rule="unreadable", hint=error.hint, source=name))
    return found, wrong


def read_source(url: str, kind: SourceKind | None = None) -> Source:
    """Reads a file, or standard input for `-`, and detects its type; `kind` decides if the content is ambiguous.

    Raises UsageError if it cannot be read or its type cannot be detected, and DocumentError for a syntax error, or if
    it is larger than a document may be.
    """
    if url.endswith(".py"):
        hint = "pass the command that starts it: dsjob import -- python train.py ..."
        raise UsageError(f"{url} is a program, which dsjob does not read", hint=hint)
    text = read_text(url).replace("\r\n", "\n")
    url = STDIN if url == "-" else url
    if not text.strip():
        raise UsageError(f"nothing to import: {url} is empty")
    plain = not url.lower().endswith(_SUFFIXES) and not text.lstrip().startswith("{")
    if kind == "command" or (plain and kind is None and _LAUNCHES.search(text)):
        return Source("command", url, command=_read_command(text, url))
    document = documents.require_few(documents.parse(text, url))
    return Source(_recognise(document, url, kind), url, document)


def _read_command(text: str, url: str) -> Command:
    if len(text) > MAX_COMMAND:
        message = f"the launch command has more than {MAX_COMMAND >> 20} MiB"
        raise DocumentError([Problem(message, (), "too-large", "pass only the line that starts the training", url)])
    if len(text.split()) > documents.MAX_KEYS:
        message = f"the launch command has more than {documents.MAX_KEYS:,} words"
        raise DocumentError([Problem(message, (), "too-large", "pass only the line that starts the training", url)])
    found = find_commands(text, url)
    if not found:
        raise UsageError(
            f"nothing to import: {url} contains no launch command",
            hint="a launch command starts with deepspeed, torchrun, accelerate launch or python",
        )
    if len(found) > 1:
        scripts = ", ".join(str(command.script.value) if command.script else "?" for command in found)
        raise UsageError(
            f"{url} contains {len(found)} launch commands ({scripts}), but only one job can be imported at a time",
            hint="put the one that you want into a file of its own, or after --",
        )
    return found[0]


def _recognise(document: Document, url: str, asked: SourceKind | None) -> SourceKind:
    content = document.value
    if not content:
        raise UsageError(f"nothing to import: {url} is an empty object")
    if {"model", "data"} <= set(content) and isinstance(content.get("trainer", {}), dict):
        raise UsageError(f"{url} is already a job document", hint=f"dsjob validate {quote_path(url)}")
    scores = {kind: sum(test(key, value) for key, value in content.items()) for kind, test in _TESTS.items()}
    best = max(scores.values())
    found = [kind for kind, score in scores.items() if score == best]
    if best and len(found) == 1 and (asked is None or asked == found[0]):
        return cast(SourceKind, found[0])
    if asked is not None:
        return asked
    keys = ", ".join(list(content)[:5])
    could = " or ".join(_WORDS[kind] for kind in (found if best else _TESTS))
    raise UsageError(
        f"cannot detect the type of {url}: its keys ({keys}) could be those of {could}",
        hint=f"set the type: --kind {'|'.join(SOURCE_KINDS)}",
    )


def name_foreign(content: dict[str, Any]) -> str:
    """The type of a document that is neither a job nor a DeepSpeed config, but that `dsjob import` reads; empty if
    unclear."""
    for kind in ("arguments", "accelerate", "determined"):
        theirs = [key for key, value in content.items() if _TESTS[kind](key, value)]
        rest = {key: value for key, value in content.items() if key not in theirs}
        if len(theirs) > len(rest) and not any(_is_deepspeed(*item) for item in rest.items()):
            return _WORDS[kind]
    return ""


def _is_deepspeed(key: str, value: Any) -> bool:
    below = contract.deepspeed_schema()["properties"].get(key)
    if below is None:
        return key == "bfloat16"
    section = "object" in below.get("type", "")
    return isinstance(value, dict) == section or value is True


def _is_argument(key: str, value: Any) -> bool:
    return (key in ARGUMENTS or key in SCRIPT_ARGUMENTS) and (not isinstance(value, dict) or "config" in key)


def _is_accelerate(key: str, value: Any) -> bool:
    return key in accelerate.KEYS and key not in accelerate.PATHS  # those are in its sections, not at the top level


def _is_determined(key: str, value: Any) -> bool:
    return key in determined.KEYS and key not in ("data", "debug", "name")  # which others have too


_TESTS: dict[str, Callable[[str, Any], bool]] = {
    "deepspeed": _is_deepspeed,
    "arguments": _is_argument,
    "accelerate": _is_accelerate,
    "determined": _is_determined,
}


def find_beside(name: str, home: str) -> str | None:
    """The local file `name` that the file `home` names: in the current folder, or in the folder of `home`; None if it
    is in neither. Nothing is fetched from the network, and a file from the network cannot name local files.
    """
    if not (storage.is_local(name) and storage.is_local(home)):
        return None
    path = storage.local_path(name)
    beside = os.path.join(os.path.dirname(storage.local_path(home)), path)
    return next((found for found in (path, beside) if os.path.isfile(found)), None)
