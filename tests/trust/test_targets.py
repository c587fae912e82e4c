"""From a dotted path and arguments to an object, and what is said when there is no such way."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsjob.contract.spec import Target, make_target
from dsjob.errors import DataError, TargetError
from dsjob.trust import targets
from dsjob.trust.grant import Trust
from dsjob.trust.signatures import Misfit, find_misfits

MODULE = """
from dataclasses import dataclass

number = 5

class Owner:
    class Inner:
        pass

    @classmethod
    def make(cls, size):
        return (cls.__name__, size)

@dataclass
class Part:
    size: int = 1

def build(width, depth=2, *, inner=None):
    return ("built", width, depth, inner)

def gather(*items, **named):
    return items, named

def fail():
    raise TypeError("build() got an unexpected keyword argument 'width'")

def keep(only, /):
    return only

def nothing():
    return None
"""


def grant() -> Trust:
    """Trust in the folder of modules, which `modules` puts first, and in two modules of the standard library."""
    return Trust(folders=(sys.path[0],), prefixes=("math", "builtins"))


def call_target(target: Target, *positional: Any) -> Any:
    return targets.call_target(target, *positional, trust=grant())


def find_target(path: str) -> Any:
    return targets.find_target(path, grant())


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules that may be imported: a package `targets_pkg` with `parts`."""
    package = tmp_path / "targets_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("targets_")]:
        del sys.modules[name]


def refuse(path: str, **arguments: Any) -> TargetError:
    with pytest.raises(TargetError) as caught:
        call_target(Target(path, arguments))
    assert caught.value.exit_code == 2
    return caught.value


# ---- finding


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("targets_pkg.parts.build", "build"),
        ("targets_pkg.parts.Owner", "Owner"),
        ("targets_pkg.parts.Owner.Inner", "Inner"),
        ("targets_pkg.parts.Owner.make", "make"),
        ("math.sqrt", "sqrt"),
    ],
)
def test_a_path_leads_through_packages_modules_and_classes(path: str, name: str) -> None:
    assert find_target(path).__name__ == name


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("zzz_none.build", "there is no module 'zzz_none'", "modules in the current folder"),
        ("targets_pgk.build", "there is no module 'targets_pgk'", 'did you mean "targets_pkg"?'),
        ("targets_pkg.prats.build", "targets_pkg has no 'prats'", 'did you mean "parts"?'),
        ("targets_pkg.parts.biuld", "targets_pkg.parts has no 'biuld'", 'did you mean "build"?'),
        ("targets_pkg.parts.Owner.mkae", "targets_pkg.parts.Owner has no 'mkae'", 'did you mean "make"?'),
        ("targets_pkg.parts.zzz", "targets_pkg.parts has no 'zzz'", ""),
    ],
)
def test_the_part_that_is_not_there_is_named(path: str, message: str, hint: str) -> None:
    error = refuse(path)
    assert error.message == f"cannot import {path}: {message}"
    assert error.hint.startswith(hint)
    assert bool(error.hint) == bool(hint)


def test_what_cannot_be_called_is_named() -> None:
    assert refuse("targets_pkg.parts.number").message == "targets_pkg.parts.number is int, which cannot be called"


def test_a_module_that_fails_while_it_is_imported_says_how(modules: Path) -> None:
    (modules / "targets_broken.py").write_text("1 / 0")
    error = refuse("targets_broken.build")
    assert error.message == (
        "cannot import targets_broken.build: importing targets_broken failed: ZeroDivisionError: division by zero"
        f" ({modules}/targets_broken.py:1 in <module>)"
    )
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_module_with_a_syntax_error_says_where(modules: Path) -> None:
    (modules / "targets_syntax.py").write_text("x = 1\ndef f(:\n")
    error = refuse("targets_syntax.f")
    assert error.message.startswith(f"cannot import targets_syntax.f: {modules}/targets_syntax.py:2:7: SyntaxError: ")
    assert error.hint == "the line is: def f(:"


@pytest.mark.parametrize("needed", ["targets_missing_package", "targets_missing_package.sub", "targets_pkg.gone"])
def test_a_module_that_needs_a_missing_one_names_it(modules: Path, needed: str) -> None:
    (modules / "targets_needy.py").write_text(f"import {needed}")
    message = refuse("targets_needy.build").message
    assert message.startswith("cannot import targets_needy.build: targets_needy needs targets_")
    assert message.endswith("which is not installed")


def test_a_module_that_dsjob_lacks_is_told_with_what_to_write(modules: Path) -> None:
    (modules / "targets_older.py").write_text("from dsjob.engines import Callback\n")
    error = refuse("targets_older.Mine")
    place = "cannot import targets_older.Mine: targets_older"
    assert error.message == f"{place} imports dsjob.engines, which is not a module of dsjob"
    assert error.hint == "write: from dsjob import NAME"


def test_an_import_name_that_is_missing_is_told(modules: Path) -> None:
    (modules / "targets_name.py").write_text("from targets_pkg.parts import nope")
    assert "ImportError: cannot import name 'nope'" in refuse("targets_name.build").message


def test_an_error_of_the_projects_own_passes_through_an_import(modules: Path) -> None:
    (modules / "targets_own.py").write_text("from dsjob.errors import DataError\nraise DataError('no data')")
    with pytest.raises(DataError, match="no data"):
        find_target("targets_own.build")


# ---- calling


def test_a_target_is_called_with_its_arguments() -> None:
    assert call_target(Target("targets_pkg.parts.build", {"width": 3})) == ("built", 3, 2, None)
    assert call_target(Target("targets_pkg.parts.Owner.make", {"size": 1})) == ("Owner", 1)
    assert call_target(Target("targets_pkg.parts.nothing", {})) is None


def test_positional_arguments_come_before_those_of_the_document() -> None:
    target = Target("targets_pkg.parts.gather", {"_args_": [2, 3], "x": 4})
    assert call_target(target, 1) == ((1, 2, 3), {"x": 4})
    assert call_target(Target("targets_pkg.parts.keep", {}), 7) == 7


def test_targets_among_the_arguments_are_called_first() -> None:
    part = {"_target_": "targets_pkg.parts.Part", "size": 3}
    arguments = {"_args_": [part], "one": part, "many": [part, {"deep": part}], "n": None}
    items, named = call_target(Target("targets_pkg.parts.gather", arguments))
    assert [item.size for item in items] == [3]
    assert named["one"].size == 3
    assert [named["many"][0].size, named["many"][1]["deep"].size] == [3, 3]
    assert named["n"] is None


def test_a_partial_target_binds_instead_of_calling() -> None:
    bound = call_target(Target("targets_pkg.parts.build", {"_partial_": True, "depth": 9}))
    assert isinstance(bound, functools.partial)
    assert bound(1) == ("built", 1, 9, None)
    assert call_target(Target("targets_pkg.parts.build", {"_partial_": False, "width": 1})) == ("built", 1, 2, None)


def test_a_partial_target_may_be_an_argument() -> None:
    inner = {"_target_": "targets_pkg.parts.Part", "_partial_": True}
    built = call_target(Target("targets_pkg.parts.build", {"width": 1, "inner": inner}))
    assert built[3](size=5).size == 5


def test_calling_leaves_the_document_as_it_is() -> None:
    document = {"_target_": "targets_pkg.parts.gather", "_args_": [1], "_partial_": False, "x": [{"y": 1}]}
    target = make_target(document)
    call_target(target)[1]["x"][0]["y"] = 2
    assert document == {"_target_": "targets_pkg.parts.gather", "_args_": [1], "_partial_": False, "x": [{"y": 1}]}
    assert target.arguments["_args_"] == [1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"widht": 3},
            'targets_pkg.parts.build has no argument "widht"\n  did you mean "width"?',
        ),
        (
            {"width": 1, "dept": 3},
            'targets_pkg.parts.build has no argument "dept"\n  did you mean "depth"?',
        ),
        (
            {"width": 1, "zzz": 3},
            'targets_pkg.parts.build has no argument "zzz"\n  it takes depth, inner',
        ),
        ({"_args_": [1, 2, 3]}, "targets_pkg.parts.build takes 2 positional arguments, not 3"),
        ({"depth": 1}, 'targets_pkg.parts.build needs the argument "width"'),
        ({"_args_": [1], "width": 1}, 'is given "width" twice: by position and by name'),
        ({"_partial_": True, "dept": 1}, 'did you mean "depth"?'),
    ],
)
def test_a_wrong_argument_is_named_with_those_that_there_are(arguments: dict[str, Any], said: str) -> None:
    assert said in str(refuse("targets_pkg.parts.build", **arguments))


def test_a_target_without_arguments_says_so() -> None:
    assert refuse("targets_pkg.parts.nothing", x=1).hint == "it takes none by name"


def test_a_wrong_argument_of_a_class_is_named() -> None:
    error = refuse("targets_pkg.parts.Part", siez=1)
    assert (error.message, error.hint) == ('targets_pkg.parts.Part has no argument "siez"', 'did you mean "size"?')


def test_an_argument_is_named_by_its_place_in_the_document() -> None:
    part = {"_target_": "targets_pkg.parts.Part", "siez": 3}
    for arguments, path in (
        ({"width": {"x": [1, part]}}, ("model", "width", "x", 1, "siez")),
        ({"_args_": [part]}, ("model", "_args_", 0, "siez")),
        ({"width": {"_target_": "targets_pkg.parts.gone"}}, ("model", "width", "_target_")),
        ({"depth": 1}, ("model", "_target_")),
    ):
        with pytest.raises(TargetError) as caught:
            targets.call_target(Target("targets_pkg.parts.build", arguments), trust=grant(), where=("model",))
        assert caught.value.path == path
        problem = caught.value.to_problem()
        assert caught.value.message == f"{problem.dotted.removesuffix('._target_')}: {problem.message}"


class Open:
    def __init__(self, **options: int) -> None: ...


class Made:
    def __new__(cls, size: int) -> Made:
        return super().__new__(cls)


@functools.wraps(Open)
def wrapped(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "positional", "keywords"),
    [
        (Open, 0, ["anything"]),
        (Made, 0, ["size"]),
        (wrapped, 0, ["anything"]),
        (functools.partial(Made, size=3), 0, []),
        (functools.partial(Made, size=3), 0, ["size"]),
        (dict, 1, ["anything"]),
        (max, 3, ["key"]),
        (print, 5, ["sep"]),
        (lambda *args: None, 7, []),
        (lambda first, /, **rest: None, 1, ["first"]),
        (Made(1).__init__, 0, []),
    ],
)
def test_a_call_that_works_has_no_misfit(function: Any, positional: int, keywords: list[str]) -> None:
    assert find_misfits("f", function, positional, keywords) == []


def test_an_argument_by_position_alone_is_told_from_an_unknown_one() -> None:
    (found,) = find_misfits("f", lambda first, /, second=1: None, 0, ["first"], partial=True)
    assert found == Misfit("first", 'f takes "first" only by position', "write its value in a list: _args_: [...]")


def test_a_target_below_that_cannot_be_made_is_named_itself() -> None:
    assert (
        "targets_pkg.parts has no 'gone'"
        in refuse("targets_pkg.parts.build", width={"_target_": "targets_pkg.parts.gone"}).message
    )


def test_an_error_inside_a_target_passes_through_as_it_is() -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'width'") as caught:
        call_target(Target("targets_pkg.parts.fail", {}))
    assert not isinstance(caught.value, TargetError)
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        call_target(Target("math.sqrt", {"_args_": [-1]}))


def test_a_built_in_without_a_signature_is_called_all_the_same() -> None:
    assert call_target(Target("builtins.dict", {"a": 1})) == {"a": 1}


def test_a_secret_that_may_be_absent_is_none_without_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSJOB_TEST_TOKEN", raising=False)
    target = Target("targets_pkg.parts.gather", {"token": "${oc.env:DSJOB_TEST_TOKEN,null}"})
    assert call_target(target) == ((), {"token": None})
    monkeypatch.setenv("DSJOB_TEST_TOKEN", "canary")
    assert call_target(target) == ((), {"token": "canary"})
