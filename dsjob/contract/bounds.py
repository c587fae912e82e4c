"""How large a document may be, whether it comes as text or as an object of a program.

All input has a budget: text has at most 16 MiB, interpolations and YAML aliases expand to at most 200,000 values and
characters (`interpolation`), pickles are counted with shared values each time (`torch_files`), and at most 200
problems are reported. Without these, a few kilobytes could keep a command busy for hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dsjob.contract.shown import shorten
from dsjob.errors import Problem

MAX_DEPTH: Final = 100  # levels of nesting; the root object is the first
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
