"""Limits on the size of a document, whether it is text or an object passed by a program.

All input has a budget: text has at most 16 MiB; interpolations and YAML aliases expand to at most 200,000 values and
characters (`interpolation`); shared values in pickles count each time they occur (`torch_files`); and at most 200
problems are reported. Without these limits, a few kilobytes could keep a command busy for hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dsjob.contract.shown import shorten
from dsjob.errors import Problem

MAX_DEPTH: Final = 100  # levels of nesting; the root object is the first
MAX_VALUES: Final = 100_000  # keys and items of lists


def check_values(value: Any, source: str) -> list[Problem]:
    """The problem of an object that is to be read as a document: keys that are not strings, numbers that JSON cannot
    hold, arrays, too many values, or too deep a tree. An object that occurs in several places counts in each of them.
    Returns at most one problem."""
    places: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    seen = 0
    while places:
        found, path = places.pop()
        items: Any = ()
        if isinstance(found, Mapping):
            if wrong := [key for key in found if not isinstance(key, str)]:
                return [Problem(f"keys must be strings, but one is {shorten(wrong[0])}", path, "type", "", source)]
            items = found.items()
        elif isinstance(found, (list, tuple)):
            items = enumerate(found)
        elif isinstance(found, int) and found.bit_length() > 1024:
            return [Problem("does not fit into a 64-bit float", path, "number", "", source)]
        elif getattr(found, "ndim", 0):
            return [Problem(f"must be a JSON value, but is {shorten(found)}", path, "type", "", source)]
        if items and len(path) >= MAX_DEPTH:
            return [Problem(f"is nested more than {MAX_DEPTH} levels deep", path[:3], "too-deep", "", source)]
        seen += len(found) if items else 0
        if seen > MAX_VALUES:
            return [Problem(f"has more than {MAX_VALUES:,} keys and list items", path[:3], "too-large", "", source)]
        places += [(part, (*path, key)) for key, part in items]
    return []
