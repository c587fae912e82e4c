"""The table of rules, and how a rule reads a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dsjob.contract.paths import Path, get_at
from dsjob.errors import Problem

Document = dict[str, Any]
Finding = tuple[str | Path, str, str]  # place (dotted where all parts are names), message, hint
Check = Callable[[Document], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """`reason`: why it is a mistake. `whole`: it needs a whole job, and says nothing of a bare DeepSpeed config."""

    id: str
    reason: str
    check: Check
    severity: str = "error"
    whole: bool = False

    def find(self, document: Document) -> Iterator[Problem]:
        """The problems of this kind in a document."""
        for place, message, hint in self.check(document):
            path: Path = place if isinstance(place, tuple) else tuple(place.split(".")) if place else ()
            yield Problem(message, path, self.id, hint, severity=self.severity)


RULES: dict[str, Rule] = {}


def enter(name: str, *, severity: str = "error", whole: bool = False) -> Callable[[Check], Check]:
    """Enters a function into the table; its docstring is the reason."""

    def add(check: Check) -> Check:
        RULES[name] = Rule(name, " ".join((check.__doc__ or "").split()), check, severity, whole)
        return check

    return add


def read(document: Document, dotted: str, default: Any = None) -> Any:
    value = get_at(document, tuple(dotted.split(".")), default)
    if isinstance(value, float) and value.is_integer():  # 1e4 is how people write a number of steps
        return int(value)
    return default if value is None else value


def is_on(document: Document, section: str) -> bool:
    return read(document, f"{section}.enabled") is True


def is_driven(document: Document) -> bool:
    """Whether the installed DeepSpeed trains in place of dsjob's own engine."""
    return bool(read(document, "engine") == "deepspeed")


def read_stage(document: Document) -> int:
    stage = read(document, "zero_optimization.stage", 0)
    return stage if isinstance(stage, int) else 0


def read_offload(document: Document, what: str) -> str:
    device = read(document, f"zero_optimization.offload_{what}.device", "none")
    return str(device)


def read_params(document: Document, section: str) -> dict[str, Any]:
    params = read(document, f"{section}.params", {})
    return params if isinstance(params, dict) else {}


def read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
