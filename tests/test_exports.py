"""What `import dsjob` offers: each name, from where it says, when it is asked for."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
from pathlib import Path

import pytest

import dsjob

NAMES = [
    "BatchConfig",
    "Callback",
    "Engine",
    "Evaluation",
    "Generation",
    "Layers",
    "ModelParallelUnit",
    "Monitor",
    "Predictions",
    "Problem",
    "Result",
    "RunInfo",
    "RunView",
    "Series",
    "Trainer",
    "add_config_arguments",
    "convert",
    "evaluate",
    "generate",
    "init_distributed",
    "initialize",
    "linear_cross_entropy",
    "list_runs",
    "load_model",
    "plan",
    "predict",
    "resolve",
    "run",
    "validate",
]

MODULES = ["checkpointing", "errors"]


def test_the_names_are_those_that_are_promised() -> None:
    assert sorted(dsjob.__all__) == sorted([*NAMES, *MODULES, "__version__"])
    assert dir(dsjob) == sorted(dsjob.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_what_its_home_has(name: str) -> None:
    module = importlib.import_module(dsjob._HOMES[name])
    assert getattr(dsjob, name) is getattr(module, name)
    assert getattr(dsjob, name).__module__ == dsjob._HOMES[name]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_imported_when_it_is_asked_for(name: str) -> None:
    assert dsjob.__getattr__(name) is importlib.import_module(f"dsjob.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(dsjob, name))


def test_type_checkers_see_the_same_names_from_the_same_homes() -> None:
    tree = ast.parse(Path(dsjob.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name: ("dsjob", name) for name in dsjob._MODULES}
    assert seen == {**modules, **{name: (home, name) for name, home in dsjob._HOMES.items()}}


def test_the_version_is_that_of_the_distribution() -> None:
    assert dsjob.__version__ == importlib.metadata.version("dsjob")


@pytest.mark.parametrize("name", ["Engin", "compose", "nope"])
def test_another_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'dsjob' has no attribute '{name}'"):
        dsjob.__getattr__(name)


def test_import_star_gives_the_names() -> None:
    scope: dict[str, object] = {}
    exec("from dsjob import *", scope)
    assert set(dsjob.__all__) <= set(scope)


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(dsjob.__file__).with_name("py.typed").exists()
