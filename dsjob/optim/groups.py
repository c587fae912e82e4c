"""Parameter groups by rules: which parameters take other values than `optimizer.params` has for the rest.

A group keeps the name of its rule, so that a resumed run finds it again.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dsjob.errors import TargetError

CONDITIONS = ("match", "min_ndim", "max_ndim")  # a rule's keys that choose; all others are values for the group


def split_groups(
    parameters: Sequence[nn.Parameter], rules: Mapping[str, Mapping[str, Any]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Groups of `parameters`: first what no rule takes, then one group a rule, in order; each has its rule's `name`.

    `names`: of parameters, by id. A parameter belongs to the first rule that takes it. Raises TargetError for a pattern
    that matches no parameter, and for a rule that is left with none.
    """
    named = [(names[id(parameter)], parameter) for parameter in parameters]
    rest, groups = list(named), []
    for name, rule in rules.items():
        _check_patterns(name, _list_patterns(rule), [own for own, _ in named])
        chosen = [pair for pair in rest if _takes(rule, *pair)]
        if not chosen:
            hint = "rules are asked in order, and the first that takes a parameter keeps it"
            raise _refuse("takes no parameter", hint, name)
        taken = {own for own, _ in chosen}
        rest = [pair for pair in rest if pair[0] not in taken]
        groups.append({**list_overrides(rule), "name": name, "params": [parameter for _, parameter in chosen]})
    return [*([{"params": [parameter for _, parameter in rest]}] if rest else []), *groups]


def list_overrides(rule: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a rule gives to its group."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in rule.items() if key not in CONDITIONS
    }


def check_overrides(rules: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]) -> None:
    """Raises TargetError for a value that the optimizer, whose groups have the keys `known`, would not look at."""
    for name, rule in rules.items():
        for key in list_overrides(rule):
            if key not in known:
                hint = f"it has {', '.join(sorted(known))}"
                raise _refuse("the optimizer has no such value for a group", hint, name, key)


def _takes(rule: Mapping[str, Any], name: str, parameter: nn.Parameter) -> bool:
    patterns = _list_patterns(rule)
    return (
        (not patterns or any(fnmatchcase(name, pattern) for pattern in patterns))
        and parameter.ndim >= rule.get("min_ndim", 0)
        and parameter.ndim <= rule.get("max_ndim", parameter.ndim)
    )


def _list_patterns(rule: Mapping[str, Any]) -> list[str]:
    given = rule.get("match", [])
    return [given] if isinstance(given, str) else list(given)


def _check_patterns(rule: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = f"near it are {', '.join(_list_near(pattern, names))}"
            raise _refuse(f'"{pattern}" matches no parameter that is trained', hint, rule, "match")


def _list_near(pattern: str, names: Sequence[str], most: int = 3) -> list[str]:
    """The names that are most like a pattern: as a whole, or in the part of them that is most like it."""
    wanted = pattern.replace("*", "").strip(".")

    def likeness(name: str) -> float:
        parts = [name, *name.split("."), name.rpartition(".")[2]]
        return max(difflib.SequenceMatcher(None, wanted, part).ratio() for part in parts)

    return sorted(names, key=lambda name: -likeness(name))[:most]


def _refuse(message: str, hint: str, *below: str) -> TargetError:
    """The error for what a rule says; `below`: its place below optimizer.param_groups."""
    error = TargetError(message, hint=hint)
    error.put_at(("optimizer", "param_groups", *below))
    return error
