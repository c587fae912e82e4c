"""The places of a document's values, as shown in messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dsjob.contract.paths import Path
from dsjob.errors import Problem

Place = tuple[str, int, int]  # source, line, column; line 0 where only the source is known
Locate = Callable[[Path], Place]


def place_problems(problems: list[Problem], locate: Locate) -> list[Problem]:
    """`problems` with source, line and column filled in from their paths."""
    placed = []
    for problem in problems:
        source, line, column = locate(problem.path)
        placed.append(replace(problem, source=source, line=line, column=column))
    return placed


def describe_place(place: Place) -> str:
    """`file:line:column`, or as much of it as is known."""
    source, line, column = place
    return f"{source}:{line}{f':{column}' if column else ''}" if line else source
