"""How many ranks hold one model together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsjob.contract.paths import Path, get_at

_TENSOR: tuple[Path, ...] = (("tensor_parallel", "size"), ("tensor_parallel", "autotp_size"))
_CONTEXT: tuple[Path, ...] = (("context_parallel", "size"), ("sequence_parallel_size",))
# The keys whose product it is. Of those in one row, which are names of the same size, the largest counts.
_ROWS: tuple[tuple[Path, ...], ...] = (
    (("trainer", "model_parallel_size"),),
    (("pipeline", "stages"),),
    _CONTEXT,
    _TENSOR,
)
KEYS: tuple[Path, ...] = tuple(path for row in _ROWS for path in row)


def read_sizes(document: Mapping[str, Any]) -> dict[Path, int]:
    """The sizes other than 1 in a document, which need not be valid, by their keys."""
    found = {}
    for row in _ROWS:
        size, path = max((_read(document, path), path) for path in row)
        if size > 1:
            found[path] = size
    return found


def _read(document: Mapping[str, Any], path: Path) -> int:
    size = get_at(document, path)
    size = int(size) if isinstance(size, float) and size.is_integer() else size
    return size if isinstance(size, int) and not isinstance(size, bool) else 1


def count_model_ranks(document: Mapping[str, Any]) -> int:
    """The ranks that hold one model together."""
    count = 1
    for size in read_sizes(document).values():
        count *= size
    return count


def read_tensor_size(document: Mapping[str, Any]) -> int:
    """The ranks among which layers are divided."""
    return max(1, *(_read(document, path) for path in _TENSOR))


def read_context_size(document: Mapping[str, Any]) -> int:
    """The ranks among which sequences are divided, in a job or in a DeepSpeed config."""
    return max(1, *(_read(document, path) for path in _CONTEXT))
