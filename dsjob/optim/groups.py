"""Splits parameters into groups by the rules in `optimizer.param_groups`, which override `optimizer.params`.

A group has the name of its rule, so that a resumed run can match it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dsjob.errors import TargetError

CONDITIONS = ("match", "min_ndim", "max_ndim")  # keys that select parameters; all others are values for the group


def split_groups(
    parameters: Sequence[nn.Parameter], rules: Mapping[str, Mapping[str, Any]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Groups of `parameters`: first those that no rule selects, then one group per rule, in order, with its `name`.

    names: of parameters, by id. A parameter belongs to the first rule that selects it. Raises TargetError for a pattern
    that matches no parameter, and for a rule that selects none.
    """
    named = [(names[id(parameter)], parameter) for parameter in parameters]
    rest, groups = list(named), []
    for name, rule in rules.items():
        _check_patterns(name, _list_patterns(rule), [own for own, _ in named])
        chosen = [pair for pair in rest if _selects(rule, *pair)]
        if not chosen:
            hint = "rules apply in order, and a parameter belongs to the first rule that selects it"
            raise _make_error("selects no parameters", hint, name)
        taken = {own for own, _ in chosen}
        rest = [pair for pair in rest if pair[0] not in taken]
        groups.append({**list_overrides(rule), "name": name, "params": [parameter for _, parameter in chosen]})
    # No first group if rules select every parameter.
    return [*([{"params": [parameter for _, parameter in rest]}] if rest else []), *groups]


def list_overrides(rule: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a rule sets for its group."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in rule.items() if key not in CONDITIONS
    }


def check_overrides(rules: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]) -> None:
    """Raises TargetError for a value that the optimizer would ignore. known: the keys of its groups."""
    for name, rule in rules.items():
        for key in list_overrides(rule):
            if key not in known:
                hint = f"its options are {', '.join(sorted(known))}"
                raise _make_error("the optimizer has no such group option", hint, name, key)


def _selects(rule: Mapping[str, Any], name: str, parameter: nn.Parameter) -> bool:
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
            hint = f"similar names: {', '.join(_list_similar(pattern, names))}"
            raise _make_error(f'"{pattern}" matches no trained parameter', hint, rule, "match")


def _list_similar(pattern: str, names: Sequence[str], most: int = 3) -> list[str]:
    """The names most similar to a pattern, as a whole or in one of their parts."""
    wanted = pattern.replace("*", "").strip(".")

    def similarity(name: str) -> float:
        parts = [name, *name.split("."), name.rpartition(".")[2]]
        return max(difflib.SequenceMatcher(None, wanted, part).ratio() for part in parts)

    return sorted(names, key=lambda name: -similarity(name))[:most]


def _make_error(message: str, hint: str, *below: str) -> TargetError:
    """An error in a rule. below: its place below optimizer.param_groups."""
    error = TargetError(message, hint=hint)
    error.put_at(("optimizer", "param_groups", *below))
    return error
