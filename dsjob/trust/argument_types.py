"""Checks the types of arguments that a document gives to callables of dsjob, by their annotations.

A value of another type would fail somewhere inside, or be taken for something else: `patience: "3"`.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsjob.contract.environment import parse_reference
from dsjob.contract.shown import shorten
from dsjob.trust.signatures import Misfit

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}


def find_wrong_types(name: str, function: Callable[..., Any], keywords: Mapping[str, Any]) -> list[Misfit]:
    """The arguments of a callable of dsjob whose type is wrong. Empty for other callables, and for annotations that
    documents cannot be held against."""
    if (getattr(function, "__module__", None) or "").partition(".")[0] != "dsjob":
        return []
    try:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (NameError, TypeError):
        return []
    return [
        Misfit(key, f"{name}: {key} must be {_describe(hints[key])}, but is {shorten(value, as_json=True)}")
        for key, value in keywords.items()
        if key in hints and not _fits(value, hints[key])
    ]


def _fits(value: Any, hint: Any) -> bool:
    made_later = isinstance(value, Mapping) and "_target_" in value
    if made_later or parse_reference(value) is not None:
        return True
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is Sequence:
        return isinstance(value, (list, tuple)) and all(_fits(each, typing.get_args(hint)[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return hint not in _NAMES or isinstance(value, hint)


def _describe(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(map(_describe, typing.get_args(hint)))
    if typing.get_origin(hint) is Sequence:
        return f"a list, each {_describe(typing.get_args(hint)[0])}"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))
