"""Calls checked by signature: which arguments a callable does not take, and which it needs, without calling it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from dsjob.contract.hints import suggest


@dataclass(frozen=True, slots=True)
class Misfit:
    """One thing wrong with a call. `argument`: the keyword that is wrong; empty for what is missing or too many."""

    argument: str
    message: str
    hint: str = ""
    too_many: bool = False


def find_misfits(
    name: str, function: Callable[..., Any], positional: int, keywords: Iterable[str], *, partial: bool = False
) -> list[Misfit]:
    """What is wrong with calling `function` with so many positional arguments and these keywords.

    Nothing where it has no signature, as built-ins need not. `partial`: more arguments come later, so none is missing.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    keywords = list(keywords)
    by_place = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    taken = [p.name for p in by_place[:positional]]
    found = []
    if positional > len(by_place) and Parameter.VAR_POSITIONAL not in kinds:
        found.append(Misfit("", f"{name} takes {len(by_place)} arguments by position, not {positional}", too_many=True))
    for key in keywords:
        if key in by_name and key in taken:
            found.append(Misfit(key, f'{name} is given "{key}" twice: by position and by name', "keep one of the two"))
        elif key not in by_name and Parameter.VAR_KEYWORD not in kinds:
            found.append(_explain(name, key, by_place, [n for n in by_name if n not in (*keywords, *taken)]))
    if partial:
        return found
    needed = [p.name for p in (*by_place, *parameters) if p.default is Parameter.empty and not _is_open(p)]
    missing = [n for n in dict.fromkeys(needed) if n not in (*taken, *keywords)]
    hints = " ".join(misfit.hint for misfit in found)
    return found + [Misfit("", f'{name} needs the argument "{n}"') for n in missing if f'mean "{n}"' not in hints]


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether a callable says that it takes an argument of this name, or any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == name or p.kind is Parameter.VAR_KEYWORD for p in parameters)


def _is_open(parameter: Parameter) -> bool:
    return parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _explain(name: str, key: str, by_place: list[Parameter], free: list[str]) -> Misfit:
    if key in (p.name for p in by_place):
        return Misfit(key, f'{name} takes "{key}" by position alone', "write its value in a list: _args_: [...]")
    takes = f"it takes {', '.join(free[:12])}{', ...' if len(free) > 12 else ''}" if free else "it takes no others"
    return Misfit(key, f'{name} has no argument "{key}"', suggest(key, free) or takes)
