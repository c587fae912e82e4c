"""Problems in their four forms, letter by letter."""

from __future__ import annotations

import json

import pytest

from dsjob.contract.report import count_problems, sort_problems, to_github, to_json, to_sarif, to_text
from dsjob.contract.rules import EXPLANATIONS
from dsjob.errors import Problem

KEY = Problem("unknown key", ("data", "shufle"), "unknown-key", 'did you mean "shuffle"?', "cfg.json", 2, 3)
ODD = Problem("is odd", ("zero_optimization", "x", 0), "odd-allgather-bucket", "", "b.yaml", 1, 1, "warning")
FILE = Problem("cannot read gone.json", rule="unreadable", source="gone.json")


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (KEY, 'cfg.json:2:3: error[unknown-key]: data.shufle: unknown key; did you mean "shuffle"?'),
        (ODD, "b.yaml:1:1: warning[odd-allgather-bucket]: zero_optimization.x[0]: is odd"),
        (FILE, "gone.json: error[unreadable]: cannot read gone.json"),
        (Problem("wrong"), "error: wrong"),
    ],
)
def test_a_problem_is_one_line(problem: Problem, line: str) -> None:
    assert to_text(problem) == str(problem) == line


def at(line: int, column: int) -> Problem:
    return Problem("wrong", ("a",), "type", "", "f", line, column)


HEAD = "error[type]: a: wrong"


@pytest.mark.parametrize(
    ("text", "problem", "shown"),
    [
        ('{\n  "a": 1\n}', at(2, 3), f'f:2:3: {HEAD}\n    2 |   "a": 1\n          ^'),
        ("a: 1", at(1, 1), f"f:1:1: {HEAD}\n    1 | a: 1\n        ^"),
        # a tab is one character of the text, and one column of what is shown
        ('\t\t"a": 1', at(1, 3), f'f:1:3: {HEAD}\n    1 |   "a": 1\n          ^'),
        ('"b":\t"a"', at(1, 6), f'f:1:6: {HEAD}\n    1 | "b": "a"\n             ^'),
        ("x\n" * 99 + "a", at(100, 1), f"f:100:1: {HEAD}\n  100 | a\n        ^"),
        ("a", at(1, 2), f"f:1:2: {HEAD}\n    1 | a\n         ^"),  # the end of the text
        ("a", at(7, 1), f"f:7:1: {HEAD}"),  # another text's place
        ("a", at(0, 0), f"f: {HEAD}"),
    ],
)
def test_a_caret_stands_below_the_place(text: str, problem: Problem, shown: str) -> None:
    assert to_text(problem, text) == shown


@pytest.mark.parametrize("column", [1, 61, 500, 5000, 9999])
@pytest.mark.parametrize("filler", [" ", "\t", "x"])
def test_of_a_long_line_what_is_around_the_place_is_shown(column: int, filler: str) -> None:
    text = filler * (column - 1) + "!" + filler * (10_000 - column)
    _, line, caret = to_text(at(1, column), text).split("\n")
    assert len(line) <= 110
    assert line[caret.index("^")] == "!"


def test_json_has_exactly_the_keys_that_were_promised() -> None:
    first, _, last = json.loads(to_json([KEY, ODD, FILE]))
    assert first == {
        "file": "cfg.json",
        "line": 2,
        "column": 3,
        "severity": "error",
        "rule": "unknown-key",
        "path": "data.shufle",
        "message": "unknown key",
        "hint": 'did you mean "shuffle"?',
    }
    assert list(first) == ["file", "line", "column", "severity", "rule", "path", "message", "hint"]
    assert (last["line"], last["column"], last["path"], last["hint"]) == (None, None, "", "")
    assert json.loads(to_json([])) == []


def test_sarif_has_what_code_scanning_asks_for() -> None:
    log = json.loads(to_sarif([KEY, KEY, ODD, FILE], "1.2.3"))
    assert log["version"] == "2.1.0"
    assert log["$schema"].startswith("https://")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("dsjob", "1.2.3")
    rules = {rule["id"]: rule["fullDescription"]["text"] for rule in driver["rules"]}
    assert len(driver["rules"]) == len(rules) == 3
    assert rules == {name: EXPLANATIONS[name] for name in ("unknown-key", "odd-allgather-bucket", "unreadable")}
    assert [result["ruleId"] for result in run["results"]] == [
        "unknown-key",
        "unknown-key",
        "odd-allgather-bucket",
        "unreadable",
    ]
    first, _, odd, unread = run["results"]
    assert first["level"] == "error"
    assert first["message"]["text"] == 'data.shufle: unknown key; did you mean "shuffle"?'
    (location,) = first["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "cfg.json"},
        "region": {"startLine": 2, "startColumn": 3},
    }
    assert odd["level"] == "warning"
    assert "region" not in unread["locations"][0]["physicalLocation"]
    spaced = json.loads(to_sarif([Problem("x", rule="type", source="my jobs/a#1.json")], "1"))["runs"][0]["results"][0]
    assert spaced["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "my%20jobs/a%231.json"}
    assert json.loads(to_sarif([], "1"))["runs"][0]["results"] == []


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (
            KEY,
            '::error file=cfg.json,line=2,col=3,title=unknown-key::data.shufle: unknown key; did you mean "shuffle"?',
        ),
        (FILE, "::error file=gone.json,title=unreadable::cannot read gone.json"),
        (ODD, "::warning file=b.yaml,line=1,col=1,title=odd-allgather-bucket::zero_optimization.x[0]: is odd"),
        (
            Problem("100%\r\nof: it, all", ("a",), "r:u,le", "50%", "C:\\a,b%.json", 1, 2),
            "::error file=C%3A\\a%2Cb%25.json,line=1,col=2,title=r%3Au%2Cle::a: 100%25%0D%0Aof: it, all; 50%25",
        ),
    ],
)
def test_githubs_commands_are_escaped(problem: Problem, line: str) -> None:
    assert to_github([problem]) == line


def test_problems_are_sorted_by_place_and_counted() -> None:
    late = Problem("x", ("a",), "type", "", "cfg.json", 10, 1)
    assert sort_problems([late, KEY, ODD]) == [ODD, KEY, late]
    assert count_problems([late, KEY, ODD]) == "2 errors, 1 warning"
    assert count_problems([]) == ""
