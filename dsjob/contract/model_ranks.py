"""How many ranks hold one model together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsjob.contract.paths import Path, get_at

# The keys whose product it is.
KEYS: tuple[Path, ...] = (("trainer", "model_parallel_size"), ("pipeline", "stages"))


def read_sizes(document: Mapping[str, Any]) -> dict[Path, int]:
    """The sizes other than 1 in a document, which need not be valid, by their keys."""
    found = {}
    for path in KEYS:
        size = get_at(document, path)
        size = int(size) if isinstance(size, float) and size.is_integer() else size
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            found[path] = size
    return found


def count_model_ranks(document: Mapping[str, Any]) -> int:
    """The ranks that hold one model together."""
    count = 1
    for size in read_sizes(document).values():
        count *= size
    return count
