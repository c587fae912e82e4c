"""The schema files that are shipped with the package. Only this module knows where they are."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def read_schema(name: str) -> dict[str, Any]:
    """`schemas/<name>` parsed; callers must not change it."""
    text = resources.files("dsjob.schemas").joinpath(name).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
