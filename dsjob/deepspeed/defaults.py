"""DeepSpeed's default arguments, from the schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsjob.contract import schema as contract


def fill_params(section: str, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an optimizer or scheduler type, with defaults filled in. section: "optimizer" or "scheduler"."""
    params = contract.params_schema(contract.deepspeed_schema()["properties"][section], kind)
    return contract.fill_defaults(dict(given), params or {})
