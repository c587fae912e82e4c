"""Handles overrides that change the type of an optimizer or schedule: decides which old arguments to keep."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from dsjob.contract import schema as contract
from dsjob.contract.paths import Path, get_at

_METHODS = ("optimizer", "scheduler")


def drop_old_arguments(document: dict[str, Any], file: dict[str, Any], overrides: Collection[Path]) -> list[str]:
    """Drops arguments that `file` sets for its own type if `overrides` choose another type.

    An argument stays if the new type takes it as well and its value is not the old type's default: then the user chose
    it deliberately. Returns messages on what was kept and dropped.
    """
    return [_drop(document, file, section) for section in _list_retyped(document, file, overrides)]


def _list_retyped(document: dict[str, Any], file: dict[str, Any], overrides: Collection[Path]) -> Iterator[Path]:
    for path in overrides:
        section, old, new = path[:-1], get_at(file, path), get_at(document, path)
        if path[-1:] != ("type",) or not section or section[-1] not in _METHODS:
            continue
        changes = isinstance(old, str) and isinstance(new, str) and old.lower() != new.lower()
        if changes and _list_properties(document, section):  # `check` reports unknown types
            yield section


def _drop(document: dict[str, Any], file: dict[str, Any], section: Path) -> str:
    params, given = get_at(document, (*section, "params")), get_at(file, (*section, "params"))
    old, new = _list_properties(file, section), _list_properties(document, section)
    kept, dropped = [], []
    for key, value in list(params.items()) if isinstance(params, dict) and isinstance(given, dict) else []:
        if key not in given or given[key] != value:
            continue  # set by an override
        if key in new and value != old.get(key, {}).get("default"):
            kept.append(f"{key} {value}")
        else:
            del params[key]
            dropped.append(key)
    names = [get_at(tree, (*section, "type")) for tree in (file, document)]
    parts = [f"keeps {', '.join(kept)}"] if kept else []
    parts += [f"drops {', '.join(dropped)}"] if dropped else []
    told = f"{'.'.join(map(str, section))}.type changes from {names[0]} to {names[1]}"
    return f"{told}: it {' and '.join(parts)}" if parts else told


def _list_properties(document: dict[str, Any], section: Path) -> dict[str, Any]:
    """The arguments of a method's type, with their schemas."""
    found = contract.find_at(contract.job_schema(), (*section, "params"), document).get("properties", {})
    return dict(found)
