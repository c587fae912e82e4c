"""The text of a job document as plain values, with the place of every key and value.

Reads JSON (also with `//`, `#` and `/* */` comments and trailing commas) and YAML, and gives JSON's kinds of values for
both: no dates, tags or infinities. Time is linear in the text. `storage` reads the bytes, `check` knows what keys mean.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from dsjob.document.json_text import JSON_START, JsonReader
from dsjob.document.positions import MAX_DEPTH
from dsjob.document.positions import Document as Document
from dsjob.document.positions import Mark as Mark
from dsjob.document.yaml_text import YamlReader
from dsjob.errors import DocumentError, Problem
from dsjob.shown import shorten

_FORMATS: Final = {".json": "json", ".jsonc": "json", ".hjson": "json", ".yaml": "yaml", ".yml": "yaml"}


def parse(text: str, source: str, *, format: Literal["json", "yaml"] | None = None) -> Document:  # noqa: A002
    """Parse a document; without `format` the suffix of `source` decides, and failing that the first character.

    Raises `DocumentError`: with the first syntax error, or else with all keys that are given twice.
    """
    document = parse_open(text, source, format=format)
    if document.duplicates:
        raise DocumentError(document.duplicates)
    return document


def parse_open(text: str, source: str, *, format: Literal["json", "yaml"] | None = None) -> Document:  # noqa: A002
    """As `parse`, but for keys that are given twice, which are left to the caller."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    path = re.split("[?#]", source)[0] if "://" in source else source
    known = format or _FORMATS.get(posixpath.splitext(path)[1].lower())
    if known == "json" or (known is None and JSON_START.match(text)):
        return JsonReader(text, source).read()
    return YamlReader(text, source).read()


MAX_KEYS: Final = 10_000  # of all objects of a document: each is compared with those that there are
MAX_VALUES: Final = 100_000  # keys and items of lists


def check_values(value: Any, source: str) -> list[Problem]:
    """What is wrong with a value that is read like a document and was given as an object: keys that are no text,
    numbers beyond JSON's, arrays, more values or a deeper tree than a document may have. What stands in several places
    is counted in each."""
    places: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    seen = 0
    while places:
        found, path = places.pop()
        items: Any = ()
        if isinstance(found, Mapping):
            if wrong := [key for key in found if not isinstance(key, str)]:
                return [Problem(f"keys must be strings, not {shorten(wrong[0])}", path, "type", "", source)]
            items = found.items()
        elif isinstance(found, (list, tuple)):
            items = enumerate(found)
        elif isinstance(found, int) and found.bit_length() > 1024:
            return [Problem("is beyond every 64-bit float", path, "number", "", source)]
        elif getattr(found, "ndim", 0):
            return [Problem(f"must be a value of JSON, not {shorten(found)}", path, "type", "", source)]
        if items and len(path) >= MAX_DEPTH:
            return [Problem(f"nested deeper than {MAX_DEPTH} levels", path[:3], "too-deep", "", source)]
        seen += len(found) if items else 0
        if seen > MAX_VALUES:
            return [Problem(f"more than {MAX_VALUES:,} keys and items of lists", path[:3], "too-large", "", source)]
        places += [(part, (*path, key)) for key, part in items]
    return []


def require_few(document: Document) -> Document:
    """`document`, or DocumentError where it has more keys or items than any job or config needs."""
    for most, what, paths in (
        (MAX_KEYS, "keys", [path for path in document.keys if isinstance(path[-1], str)]),
        (MAX_VALUES, "keys and items of lists", list(document.keys)),
    ):
        if len(paths) > most:
            mark = document.keys[paths[most]]
            message, hint = f"more than {most:,} {what} up to here", "data belongs in files that the document names"
            raise DocumentError([Problem(message, (), "too-large", hint, document.source, mark.line, mark.column)])
    return document
