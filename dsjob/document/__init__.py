"""Parses the text of a job document into plain values, and records the place of every key and value.

Reads JSON (comments with `//`, `#` and `/* */` and trailing commas are allowed) and YAML. Both yield only JSON's types:
no dates, tags or infinities. Parsing takes linear time. `storage` reads the bytes; `check` knows what the keys mean.
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
    """Parses a document. If `format` is None, the suffix of `source` decides, otherwise the first character.

    Raises `DocumentError` with the first syntax error, or with all duplicate keys.
    """
    document = parse_open(text, source, format=format)
    if document.duplicates:
        raise DocumentError(document.duplicates)
    return document


def parse_open(text: str, source: str, *, format: Literal["json", "yaml"] | None = None) -> Document:  # noqa: A002
    """Like `parse`, but leaves duplicate keys to the caller (`Document.duplicates`)."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    path = re.split("[?#]", source)[0] if "://" in source else source
    known = format or _FORMATS.get(posixpath.splitext(path)[1].lower())
    if known == "json" or (known is None and JSON_START.match(text)):
        return JsonReader(text, source).read()
    return YamlReader(text, source).read()


MAX_KEYS: Final = 10_000  # in all objects of a document; bounds the time of suggestions for unknown keys


def require_few(document: Document) -> Document:
    """Returns `document`. Raises DocumentError if it has more keys or items than any job or config needs."""
    for most, what, paths in (
        (MAX_KEYS, "keys", [path for path in document.keys if isinstance(path[-1], str)]),
        (MAX_VALUES, "keys and items of lists", list(document.keys)),
    ):
        if len(paths) > most:
            mark = document.keys[paths[most]]
            message, hint = f"more than {most:,} {what} up to here", "move data into files that the document names"
            raise DocumentError([Problem(message, (), "too-large", hint, document.source, mark.line, mark.column)])
    return document
