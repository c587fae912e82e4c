"""Where the values of a resolved job come from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from dsjob.contract import schema as contract
from dsjob.contract.paths import Path
from dsjob.contract.secrets import hide_secrets, hide_value
from dsjob.document.origins import Composed
from dsjob.document.resolve import Resolved


def describe_given(composed: Composed, resolved: Resolved) -> dict[str, Any]:
    """The job as it was given, without secrets: its file, the document in it, recipes and overrides, and the origin of
    each resolved value by its path."""
    file, schema = composed.file, contract.job_schema()
    source = file.source if file is not None else None  # also a URL, the standard input, or a program's dict
    given = (override for path, override in composed.overrides.items() if path != ("job_file",))  # Hydra's own
    paths = (path for path, _ in list_leaves(resolved.document, schema) if path[0] != "resolved")
    return {
        "file": os.path.abspath(file.source) if file is not None and os.path.isfile(file.source) else source,
        "document": hide_secrets(file.value) if file is not None else None,
        "recipes": list(composed.recipes),
        "overrides": [hide_value(override) for override in given],
        "origins": {".".join(map(str, path)): find_origin(path, composed, resolved) for path in paths},
    }


def list_leaves(value: dict[str, Any], schema: contract.Schema | None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values of a document that contain no others, with their paths."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from list_leaves(item, contract.child(schema or {}, key, value), (*path, key))
        else:
            yield (*path, key), item


def find_origin(path: Path, composed: Composed, resolved: Resolved) -> str:
    """The origin of the resolved value at `path`: a place in a file, an override, or what it was derived from."""
    if path in resolved.derived:
        return resolved.derived[path]
    if path == ("name",) and composed.is_name_made():
        return "name of the file"
    given = composed.find_given(path)
    if given is None:
        return "default"
    source, line, column = composed.locate(given)
    return f"{source}:{line}:{column}" if line else source
