"""One form of a document: the spelling of today, whole numbers as integers, and a value for every key.

Whatever reads the values of a document does so after this, so that nothing else knows of old spellings, "auto" or
defaults.
"""

from __future__ import annotations

from typing import Any

from dsjob.contract import legacy
from dsjob.contract import schema as contract
from dsjob.contract.paths import Path
from dsjob.contract.schema import Schema
from dsjob.document.auto import resolve_auto


def normalise(document: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """A document, which need not be valid, in the keys of today, with integers where `schema` asks for them."""
    normal: dict[str, Any] = use_integers(_rename(legacy.map_amp(legacy.expand(document)), schema), schema)
    return normal


def complete(job: dict[str, Any]) -> tuple[dict[str, Any], dict[Path, str]]:
    """A checked and normalised job with a value for every key; and by path, in words, how "auto" was decided."""
    job, derived = resolve_auto(job)
    return contract.fill_defaults(job, contract.job_schema()), derived


def use_integers(value: Any, schema: Schema) -> Any:
    """Whole floats (5e8) become integers where the schema asks for integers. Which argument of an optimizer is one is
    known only where its `type` is there too."""
    if schema.get("type") == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: use_integers(item, contract.child(schema, key, value) or {}) for key, item in value.items()}
    return value


def _rename(value: Any, schema: Schema) -> Any:
    if not isinstance(value, dict):
        return value
    renamed = {}
    for key, item in value.items():
        below = contract.child(schema, key, value)
        name = below.get("x-alias-of", key) if below else key
        renamed[name] = _rename(item, below) if below else item
    return renamed
