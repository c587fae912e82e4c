"""Formats for problems, for people and programs: text with the source line, JSON, SARIF, GitHub's annotations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from dsjob.contract.rules import EXPLANATIONS
from dsjob.errors import Problem

FORMATS = ("text", "json", "sarif", "github")
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Sorted by file, line and column. The note that there are `more` problems comes last."""
    return sorted(problems, key=lambda p: (p.rule == "more", p.source, p.line, p.column, p.dotted, p.rule))


def count_problems(problems: Sequence[Problem]) -> str:
    """`2 errors, 1 warning`."""
    counts = {kind: sum(problem.severity == kind for problem in problems) for kind in ("error", "warning")}
    parts = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items() if count]
    return ", ".join(parts)


def to_text(problem: Problem, text: str | None = None) -> str:
    """A problem on one line. With the document's `text`, also the source line, and a caret below the column."""
    if text is None or not problem.line:
        return str(problem)
    lines = text.split("\n")
    if problem.line > len(lines):
        return str(problem)
    line = lines[problem.line - 1]
    # The terminal's width is not known here. Of a long line, show the part around the column.
    start = max(0, problem.column - 60)
    shown = "".join(c if c.isprintable() else " " for c in line[start : start + 100])
    number = f"{problem.line:>5} | "
    return f"{problem}\n{number}{shown}\n{' ' * len(number)}{' ' * (problem.column - 1 - start)}^"


def to_json(problems: Sequence[Problem]) -> str:
    """A list of objects: file, line, column, severity, rule, path, message, hint."""
    return json.dumps([to_object(problem) for problem in problems], indent=2)


def to_object(problem: Problem) -> dict[str, Any]:
    """A problem as JSON values; line and column are 1-based, or null if unknown."""
    return {
        "file": problem.source,
        "line": problem.line or None,
        "column": problem.column or None,
        "severity": problem.severity,
        "rule": problem.rule,
        "path": problem.dotted,
        "message": problem.message,
        "hint": problem.hint,
    }


def to_github(problems: Sequence[Problem]) -> str:
    """Workflow commands, which GitHub shows next to the lines of a pull request."""
    lines = []
    for problem in problems:
        place = f"file={_escape(problem.source, ':,')}"
        if problem.line:
            place += f",line={problem.line},col={problem.column}"
        text = f"{problem.dotted}: " if problem.path else ""
        text += problem.message + (f"; {problem.hint}" if problem.hint else "")
        lines.append(f"::{problem.severity} {place},title={_escape(problem.rule, ':,')}::{_escape(text)}")
    return "\n".join(lines)


def _escape(text: str, more: str = "") -> str:
    """`text` with the characters escaped that end a workflow command, and those in `more`, which end a property."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def to_sarif(problems: Sequence[Problem], version: str) -> str:
    """SARIF 2.1.0, the input format of GitHub's code scanning."""
    rules = sorted({problem.rule for problem in problems})
    results = []
    for problem in problems:
        region: Mapping[str, int] = {"startLine": problem.line, "startColumn": problem.column} if problem.line else {}
        location = {
            "artifactLocation": {"uri": quote(problem.source, safe="/:")},
            **({"region": region} if region else {}),
        }
        text = problem.message + (f"; {problem.hint}" if problem.hint else "")
        results.append(
            {
                "ruleId": problem.rule,
                "level": problem.severity,
                "message": {"text": f"{problem.dotted}: {text}" if problem.path else text},
                "locations": [{"physicalLocation": location}],
            }
        )
    driver = {
        "name": "dsjob",
        "version": version,
        "rules": [{"id": rule, "fullDescription": {"text": EXPLANATIONS.get(rule, rule)}} for rule in rules],
    }
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)
