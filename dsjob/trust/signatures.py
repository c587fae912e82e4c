"""Checks the arguments of a call against the callable's signature, without calling it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from dsjob.contract.hints import suggest


@dataclass(frozen=True, slots=True)
class Misfit:
    """A problem with a call. `argument`: the wrong keyword; empty for missing and surplus arguments."""

    argument: str
    message: str
    hint: str = ""
    too_many: bool = False


def find_misfits(
    name: str, function: Callable[..., Any], positional: int, keywords: Iterable[str], *, partial: bool = False
) -> list[Misfit]:
    """The problems with calling `function` with this number of positional arguments and these keywords.

    Empty if the function has no signature, as some built-ins. `partial`: missing arguments may be added later.
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
        found.append(Misfit("", f"{name} takes {len(by_place)} positional arguments, not {positional}", too_many=True))
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
    """Whether a callable's signature accepts a keyword argument of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == name or p.kind is Parameter.VAR_KEYWORD for p in parameters)


def _is_open(parameter: Parameter) -> bool:
    return parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _explain(name: str, key: str, by_place: list[Parameter], free: list[str]) -> Misfit:
    if key in (p.name for p in by_place):
        return Misfit(key, f'{name} takes "{key}" only by position', "write its value in a list: _args_: [...]")
    takes = f"it takes {', '.join(free[:12])}{', ...' if len(free) > 12 else ''}" if free else "it takes no others"
    return Misfit(key, f'{name} has no argument "{key}"', suggest(key, free) or takes)
