"""Paths into documents: the keys and list indices that lead from the root to a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Path = tuple[str | int, ...]


def is_comment(key: object) -> bool:
    """Whether a key of a document is a comment (`_comment`, `_comment_lr`), which is ignored everywhere."""
    return isinstance(key, str) and key.startswith("_comment")


def has_at(value: Any, path: Path) -> bool:
    """Whether nested mappings have a value at `path`, even if it is null."""
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def get_at(value: Any, path: Path, default: Any = None) -> Any:
    """The value at `path` in nested mappings; `default` if there is none."""
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value
