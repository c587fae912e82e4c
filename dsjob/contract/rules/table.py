"""The table of rules, and functions with which a rule reads a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dsjob.contract.paths import Path, get_at
from dsjob.errors import Problem

Document = dict[str, Any]
Finding = tuple[str | Path, str, str]  # place (a dotted string, or a path if some parts are indices), message, hint
Check = Callable[[Document], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """`reason`: why it is a mistake. `whole`: only applies to a whole job, not to a bare DeepSpeed config. `bare`: the
    severity in a bare config, if it is another one there."""

    id: str
    reason: str
    check: Check
    severity: str = "error"
    whole: bool = False
    bare: str = ""

    def find(self, document: Document, *, bare: bool = False) -> Iterator[Problem]:
        """The places in a document, or in a bare DeepSpeed config, that break this rule, as problems."""
        for place, message, hint in self.check(document):
            path: Path = place if isinstance(place, tuple) else tuple(place.split(".")) if place else ()
            yield Problem(message, path, self.id, hint, severity=(bare and self.bare) or self.severity)


RULES: dict[str, Rule] = {}


def enter(name: str, *, severity: str = "error", whole: bool = False, bare: str = "") -> Callable[[Check], Check]:
    """Registers a function as the rule `name`; the first use of its docstring is `dsjob validate --explain`."""

    def add(check: Check) -> Check:
        RULES[name] = Rule(name, " ".join((check.__doc__ or "").split()), check, severity, whole, bare)
        return check

    return add


def read(document: Document, dotted: str, default: Any = None) -> Any:
    """The value at a dotted path; `default` if it is missing or None (reported already, see `check`)."""
    value = get_at(document, tuple(dotted.split(".")), default)
    if isinstance(value, float) and value.is_integer():  # people write numbers of steps as 1e4
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
    """`value` as a float; None if it is not a number. A boolean is not one, although Python counts it as an int."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
