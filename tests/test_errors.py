"""The tree of errors, their exit codes, and how problems are written."""

from __future__ import annotations

import inspect
import pickle
import re
import tomllib
from pathlib import Path

import pytest

from dsjob import errors
from dsjob.errors import ConfigError, DocumentError, DsjobError, Interrupted, LaunchError, Problem

CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, DsjobError)}


def make_error(kind: type[DsjobError]) -> DsjobError:
    if issubclass(kind, DocumentError):
        return kind([Problem("wrong", ("a",))])
    return kind(2, hint="do this") if issubclass(kind, Interrupted) else kind("wrong", hint="do this")


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    drawn = {}
    parents: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"( {4}[ |`-]*)(\w+) +(\d[\d/ ]*\d|\d)", line):
            depth = len(found[1])
            parents[depth] = found[2]
            above = max((other for other in parents if other < depth), default=None)
            drawn[found[2]] = ("Exception" if above is None else parents[above], found[3])
    actual = {
        name: (kind.__bases__[0].__name__, "130 / 143" if kind is Interrupted else str(kind.exit_code))
        for name, kind in CLASSES.items()
    }
    assert drawn == actual


@pytest.mark.parametrize("kind", CLASSES.values())
def test_every_error_survives_the_way_between_processes(kind: type[DsjobError]) -> None:
    error = make_error(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.exit_code, again.hint) == (str(error), error.exit_code, error.hint)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES.values() if not issubclass(kind, DocumentError)])
def test_the_hint_follows_the_message_on_a_line_of_its_own(kind: type[DsjobError]) -> None:
    assert re.fullmatch(r"[^\n]+\n  do this", str(make_error(kind)))


@pytest.mark.parametrize(("number", "code", "told"), [(2, 130, "interrupted"), (15, 143, "stopped by SIGTERM")])
def test_interrupted_exits_as_shells_count_signals(number: int, code: int, told: str) -> None:
    assert Interrupted(number).exit_code == code
    assert str(Interrupted(number)) == told


def test_a_launch_failure_may_carry_the_code_of_the_rank_that_failed() -> None:
    assert LaunchError("rank 1 failed", exit_code=2).exit_code == 2
    assert LaunchError("rank 1 failed").exit_code == 1


@pytest.mark.parametrize(
    ("path", "dotted"),
    [
        ((), ""),
        (("trainer",), "trainer"),
        (("trainer", "micro_batch"), "trainer.micro_batch"),
        (("data", "files", 0), "data.files[0]"),
        (("a", 1, "b", 2), "a[1].b[2]"),
    ],
)
def test_a_path_is_spelt_as_on_the_command_line(path: tuple[str | int, ...], dotted: str) -> None:
    assert Problem("", path).dotted == dotted


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("wrong"), "error: wrong"),
        (Problem("wrong", ("a", "b")), "error: a.b: wrong"),
        (Problem("wrong", ("a",), "rule", "do this"), "error[rule]: a: wrong; do this"),
        (Problem("wrong", ("a",), source="job.json", line=3, column=7), "job.json:3:7: error: a: wrong"),
        (Problem("wrong", source="command line: a=1"), "command line: a=1: error: wrong"),
        (Problem("odd", ("a",), source="j", line=1, column=2, severity="warning"), "j:1:2: warning: a: odd"),
    ],
)
def test_a_problem_is_written_as_place_path_message_and_hint(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_problems_come_in_the_order_of_their_places() -> None:
    places = [("b.json", 1, 1), ("a.json", 10, 1), ("a.json", 2, 9), ("a.json", 2, 1)]
    found = [Problem(f"number {i}", (), "", "", *place) for i, place in enumerate(places)]
    error = ConfigError(found)
    assert [(p.source, p.line, p.column) for p in error.problems] == sorted(places)
    assert str(error).splitlines() == [str(problem) for problem in error.problems]


def test_a_problem_is_one_line_that_steers_no_terminal() -> None:
    text = str(Problem("has \x1b[31m and\nmore", ("a\u202eb",), "type", source="j\x85.json"))
    assert text == r"j\x85.json: error[type]: a\u202eb: has \x1b[31m and\nmore"


def test_hints_install_what_the_extras_install() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    asked = {each for extra in project["optional-dependencies"].values() for each in extra}
    assert set(errors.OPTIONAL.values()) <= asked
    assert errors.how_to_install("peft") == "pip install 'peft>=0.17'"
