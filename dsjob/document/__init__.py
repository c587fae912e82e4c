"""The text of a job document as plain values, with the place of every key and value.

Reads JSON (also with `//`, `#` and `/* */` comments and trailing commas) and YAML, and gives JSON's kinds of values for
both: no dates, tags or infinities. Time is linear in the text. `storage` reads the bytes, `check` knows what keys mean.
"""

from __future__ import annotations

import posixpath
import re
from typing import Final, Literal

from dsjob.contract.bounds import MAX_VALUES
from dsjob.document.json_text import JSON_START, JsonReader
from dsjob.document.positions import Document as Document
from dsjob.document.positions import Mark as Mark
from dsjob.document.yaml_text import YamlReader
from dsjob.errors import DocumentError, Problem

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
