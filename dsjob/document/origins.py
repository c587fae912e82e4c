"""A composed job document, and the origin of its values: command line, job file, DeepSpeed file or recipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsjob import document as documents
from dsjob import storage
from dsjob.contract import legacy
from dsjob.contract import schema as contract
from dsjob.contract.access import Access
from dsjob.contract.deepspeed_keys import to_config_path
from dsjob.contract.hints import suggest
from dsjob.contract.locations import shorten
from dsjob.contract.paths import Path, get_at, has_at
from dsjob.contract.secrets import hide_value
from dsjob.document import Document
from dsjob.document.places import Place
from dsjob.document.retyped import drop_old_arguments
from dsjob.errors import DocumentError, Problem, StorageError, UsageError


@dataclass(frozen=True)
class Composed:
    """A composed document without unset keys, and the sources of its values."""

    document: dict[str, Any]
    file: Document | None = None
    recipes: tuple[str, ...] = ()
    overrides: Mapping[Path, str] = field(default_factory=dict)
    deepspeed: Document | None = None
    notes: tuple[str, ...] = ()  # messages to the user on changes other than merging
    unknown: tuple[Problem, ...] = ()  # problems of overrides that set unknown keys, and were therefore left out
    named: frozenset[Path] = frozenset()  # the paths of the values that the user has set in overrides

    def is_name_made(self) -> bool:
        """Whether the job's name is derived from its file name, because nothing else sets it."""
        given = self.file is None or ("name",) in self.file.keys or ("name",) in self.overrides
        return not given and not self.recipes

    def locate(self, path: Path) -> Place:
        """The place that sets the value at `path`."""
        if self.deepspeed is not None and path[:1] == ("deepspeed",) and len(path) > 1:
            mark = self.deepspeed.mark(path[1:])
            return self.deepspeed.source, mark.line, mark.column
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return f"command line: {hide_value(self.overrides[path[:length]])}", 0, 0
        # With a recipe, a value comes from the file only if the file has this exact path.
        if self.file is not None and (path in self.file.keys or not path or not self.recipes):
            mark = self.file.mark(path)
            return self.file.source, mark.line, mark.column
        return (f"recipe {', '.join(self.recipes)}" if self.recipes else "command line"), 0, 0

    def find_given(self, path: Path) -> Path | None:
        """The path at which the document sets the resolved value at `path`, in any spelling; None for a default."""
        bases: tuple[tuple[Path, Path, Any, contract.Schema], ...] = (
            ((), path, self.document, contract.job_schema()),
            (("deepspeed",), to_config_path(path), self.document.get("deepspeed"), contract.deepspeed_schema()),
        )
        for prefix, wanted, base, schema in bases:
            if isinstance(base, dict) and (found := _find_spelling(wanted, base, schema)) is not None:
                return (*prefix, *found)
        return None


def _find_spelling(path: Path, document: dict[str, Any], schema: contract.Schema) -> Path | None:
    by_amp = path[0] in ("fp16", "torch_autocast") and path[1:] in (("enabled",), ("dtype",))
    if by_amp and get_at(document, ("amp", "enabled")) is True:
        return ("amp", "opt_level") if has_at(document, ("amp", "opt_level")) else ("amp", "enabled")
    parent = path[:-1]
    for key in _list_spellings(path, get_at(document, parent), contract.find_at(schema, parent, document)):
        return (*parent, key)
    old = legacy.find_spelling(path, document)
    return old if old != path and has_at(document, old) else None


def _list_spellings(path: Path, section: Any, schema: contract.Schema) -> list[str]:
    """The keys of `section` that set the value at `path`: the key itself, and its aliases."""

    def name(key: Any) -> Any:
        return (contract.child(schema, key, section) or {}).get("x-alias-of", key) if isinstance(key, str) else key

    return [key for key in section if name(key) == name(path[-1])] if isinstance(section, dict) else []


def settle(
    values: dict[str, Any],
    *,
    file: Document | None = None,
    recipes: tuple[str, ...] = (),
    overrides: Mapping[Path, str] | None = None,
) -> Composed:
    """Merged values as a composed document: nulls dropped, the name filled in, the DeepSpeed file read."""
    document = contract.prune(values, contract.job_schema())
    for path in overrides or {}:  # an override also replaces other spellings of its key
        section = get_at(document, path[:-1])
        for key in _list_spellings(path, section, contract.find_at(contract.job_schema(), path[:-1], document)):
            if (*path[:-1], key) not in (overrides or {}):
                del section[key]
    notes = drop_old_arguments(document, file.value, overrides or {}) if file is not None else []
    document.setdefault("name", _make_name(file, recipes))
    deepspeed = _read_deepspeed(document, file if ("deepspeed",) not in (overrides or {}) else None)
    if deepspeed is not None:
        document["deepspeed"] = contract.prune(deepspeed.value, contract.deepspeed_schema())
    return Composed(document, file, recipes, overrides or {}, deepspeed, tuple(notes))


STDIN = "<stdin>"  # the source of a document from standard input
PROGRAM = "<dict>"  # the source of a document that a Python program passes
_LOOKED_AT = 100  # the most keys to examine in a file that may not be a config
MAX_SIZE = 16 << 20  # bytes of a document; parsing that many takes about 2 GB of memory


def read_document(url: str) -> Document:
    """Reads and parses a job file, or standard input for `-`.

    Raises UsageError if it cannot be read, DocumentError if it cannot be parsed.
    """
    return documents.require_few(documents.parse(read_text(url), STDIN if url == "-" else url))


def read_text(url: str) -> str:
    """Reads the text of a file, or of standard input for `-`.

    Raises UsageError if it cannot be read, DocumentError if it is longer than `MAX_SIZE`.
    """
    if url == "-":
        return _require_small(sys.stdin.read(MAX_SIZE + 1), STDIN)
    try:
        return _require_small(storage.read_text(url, MAX_SIZE + 1), url)
    except StorageError as error:
        raise UsageError(error.message, hint=error.hint) from error


def _require_small(text: str, source: str) -> str:
    if len(text) > MAX_SIZE:
        message = f"a document of more than {MAX_SIZE >> 20} MiB"
        raise DocumentError([Problem(message, (), "too-large", "move data into files that the document names", source)])
    return text


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Whether a document is a bare DeepSpeed config: it has DeepSpeed's keys, and none that only job documents have."""
    ours, theirs = set(contract.job_schema()["properties"]), set(contract.deepspeed_schema()["properties"])
    return bool(set(values) & theirs) and not set(values) & (ours - theirs)


def _make_name(file: Document | None, recipes: tuple[str, ...]) -> str:
    named = file is not None and file.source != PROGRAM
    stem = recipes[0] if recipes else os.path.splitext(os.path.basename(file.source))[0] if file and named else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "job"


def _read_deepspeed(document: dict[str, Any], file: Document | None) -> Document | None:
    """Reads the DeepSpeed config that the document names. Its path is relative to the job file."""
    name = document.get("deepspeed")
    if not isinstance(name, str):
        return None
    if name == "-":
        raise UsageError("deepspeed: a document cannot name standard input", hint="give the path of a file")
    relative = "://" not in name and not os.path.isabs(name)
    if relative and file is not None and ("deepspeed",) in file.keys and "/" in file.source:
        name = f"{file.source.rsplit('/', 1)[0]}/{name}"
    try:
        if file is not None and ("deepspeed",) in file.keys:
            _require_open(name, file)
        return _require_config(read_document(name))
    except UsageError as error:
        mark = file.mark(("deepspeed",)) if file is not None else None
        place = (file.source, mark.line, mark.column) if file is not None and mark is not None else ("", 0, 0)
        problem = Problem(error.message, ("deepspeed",), "unreadable", "paths are relative to the job file", *place)
        raise DocumentError([problem]) from error


def _require_open(name: str, file: Document) -> None:
    """Raises DocumentError if a document may not read the file that it names."""
    rule, message, hint = Access.of_source(file.source).explain(name)
    if rule:
        mark, message = file.mark(("deepspeed",)), f"{shorten(name)}: {message}"
        raise DocumentError([Problem(message, ("deepspeed",), rule, hint, file.source, mark.line, mark.column)])


def _require_config(config: Document) -> Document:
    """Returns `config` if it is a DeepSpeed config. The error for any other file quotes none of it: the document may
    name a file of secrets."""
    known = contract.job_schema()["properties"].keys() | contract.deepspeed_schema()["properties"].keys()
    given = legacy.expand(config.value)
    if given and known.isdisjoint(given) and not any(suggest(key, list(known)) for key in list(given)[:_LOOKED_AT]):
        message = "this is not a DeepSpeed config: it has none of its keys"
        hint = "deepspeed must name a config such as {train_batch_size: 32, ...}"
        raise DocumentError([Problem(message, (), "not-a-config", hint, config.source, 1, 1)])
    return config
