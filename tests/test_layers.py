"""The house rules of imports: an import goes down or stays in its layer, nothing goes in circles, third parties have
one home, and torch starts at layer 2."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dsjob"

# Each module or package of dsjob/ and the layer it lives in; `dsjob` itself only points at what is below.
LAYERS: dict[int, set[str]] = {
    0: {
        "environment",
        "patience",
        "errors",
        "paths",
        "redaction",
        "literals",
        "locations",
        "resources",
        "sharding",
        "shown",
        "spec",
    },
    1: {
        "document",
        "schema",
        "check",
        "batch",
        "bounds",
        "dsconfig",
        "resolve",
        "origins",
        "compose",
        "interpolation",
        "job_file",
        "storage",
        "targets",
        "run_folder",
        "failures",
        "frames",
        "failed_starts",
        "stalls",
        "exits",
        "retyped",
        "rules",
        "torch_names",
        "models",
        "foreign",
        "report",
        "auto",
        "legacy",
        "config",
        "views",
        "reference",
        "importing",
        "plan",
        "trust",
        "hub",
        "model_files",
        "advice",
        "signatures",
    },
    2: {
        "mesh",
        "agreement",
        "meeting",
        "watchdog",
        "mpu",
        "precision",
        "autocast",
        "optim",
        "data",
        "seeding",
        "activation",
        "checkpointing",
    },
    3: {"parallel", "checkpoint", "blocks"},
    4: {
        "engine",
        "nodes",
        "engines",
        "steps",
        "averaging",
        "metrics",
        "metric_inputs",
        "rhythm",
        "verdict",
        "readings",
        "backward",
        "settings",
        "saving",
        "residence",
        "parameters",
        "zero",
        "entry",
        "deepspeed_engine",
        "deepspeed_state",
        "rendezvous",
        "torch_autocast",
        "callbacks",
        "contract",
        "progress",
    },
    5: {"loop", "evaluation", "occasions", "training", "saves", "deepspeed"},
    6: {"job", "resume", "summary", "launch", "rank", "joined", "supervisor", "probe", "comparison", "loaders"},
    7: {"cli", "__main__"},
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
WITHOUT_TORCH = LAYERS[0] | LAYERS[1] | {"cli", "__main__", "launch", "rank", "supervisor"}

# Who may import a third party, at whatever level.
HOMES: dict[str, set[str]] = {
    "hydra": {"compose", "cli.sweep"},
    "omegaconf": {"compose", "interpolation", "cli.sweep"},
    "jsonschema": {"check"},
    "fsspec": {"storage"},
    "safetensors": {"checkpoint"},
    "torch.distributed.checkpoint": {"checkpoint"},
    "rich": {"progress", "cli.sweep", "cli.plan_text", "cli.bar"},
    "yaml": {"document", "compose", "cli.output"},
    "deepspeed": {"deepspeed_engine", "deepspeed_state"},
    "numpy": {"checkpoint", "seeding"},
    "transformers": {"checkpoint.architecture", "model_files"},
    "peft": {"checkpoint.architecture"},
    "huggingface_hub": {"checkpoint.tokenizer"},
}
STANDALONE = "checkpoint.zero_to_fp32"
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "tools", "base_utils"}


@dataclass(frozen=True)
class Import:
    """`importer` names `name` (dotted) on `line`; `late` inside a function, `typing` for type checkers only."""

    importer: str
    name: str
    line: int
    late: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


def list_modules() -> dict[str, Path]:
    """Modules of dsjob/ by their names without `dsjob.`; packages by their own name, "" is dsjob itself."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = list_modules()


def is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def find_imports(name: str, tree: ast.Module) -> Iterator[Import]:
    def walk(node: ast.AST, late: bool, typing: bool) -> Iterator[Import]:
        for below in ast.iter_child_nodes(node):
            if isinstance(below, ast.Import):
                yield from (Import(name, alias.name, below.lineno, late, typing) for alias in below.names)
            elif isinstance(below, ast.ImportFrom):
                # Of `from a import b`, a.b may be a module: the longer name says more.
                start = "." * below.level + (below.module or "")
                for alias in below.names:
                    yield Import(name, f"{start}.{alias.name}", below.lineno, late, typing)
            inside = late or isinstance(below, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            only_typing = typing or (isinstance(below, ast.If) and is_type_checking(below))
            yield from walk(below, inside, only_typing)

    yield from walk(tree, late=False, typing=False)


IMPORTS = [found for name, path in MODULES.items() for found in find_imports(name, ast.parse(path.read_text()))]


def own_module(name: str) -> str | None:
    """The module of dsjob/ that a dotted name leads to; None for names outside."""
    first, *inside = name.split(".")
    places = (".".join(inside), ".".join(inside[:-1]))
    return next((place for place in places if place in MODULES), None) if first == "dsjob" else None


def home(module: str) -> str:
    return module.split(".")[0]


def lives_in(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def starts_with(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_imports_are_found() -> None:
    source = """
import a.b
from c import d, e
if TYPE_CHECKING:
    from f import g
def function():
    import h
class Owner:
    import i
"""
    found = {(item.name, item.late, item.typing) for item in find_imports("x", ast.parse(source))}
    assert found == {
        ("a.b", False, False),
        ("c.d", False, False),
        ("c.e", False, False),
        ("f.g", False, True),
        ("h", True, False),
        ("i", False, False),
    }
    assert len(MODULES) > 30
    assert len(IMPORTS) > 200


def test_every_module_has_a_layer_and_every_name_in_the_table_is_a_module() -> None:
    assert {home(module) for module in MODULES if module} == set(LAYER_OF)
    assert sum(len(names) for names in LAYERS.values()) == len(LAYER_OF)


def test_imports_are_absolute() -> None:
    assert [str(found) for found in IMPORTS if found.name.startswith(".")] == []


def test_imports_go_down_or_stay() -> None:
    """Late ones too; what only type checkers see as well, but for the list of names in dsjob/__init__.py."""
    wrong = [
        str(found)
        for found in IMPORTS
        if found.importer
        and (target := own_module(found.name))
        and LAYER_OF[home(target)] > LAYER_OF[home(found.importer)]
    ]
    assert wrong == []


def test_the_package_itself_imports_nothing_of_its_own_until_asked() -> None:
    early = [found for found in IMPORTS if not found.importer and not (found.late or found.typing)]
    assert [str(found) for found in early if own_module(found.name) is not None] == []


def import_graph() -> dict[str, set[str]]:
    """What is executed when a module is imported: the modules it names, and the packages these lie in."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        target = own_module(found.name)
        if target is None or found.late or found.typing:
            continue
        parts = target.split(".")
        packages = {".".join(parts[:length]) for length in range(1, len(parts))}
        # The package that the importer lies in is there already.
        graph[found.importer] |= {target, *(name for name in packages if not starts_with(found.importer, name))}
    return graph


def test_no_modules_import_one_another_in_a_circle() -> None:
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_third_parties_have_one_home() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        for package, places in HOMES.items()
        if starts_with(found.name, package) and not lives_in(found.importer, places)
    ]
    assert wrong == []


def test_every_third_party_is_in_the_table() -> None:
    known = {package.split(".")[0] for package in HOMES} | {"torch", "dsjob"} | set(sys.stdlib_module_names)
    assert [str(found) for found in IMPORTS if found.name.split(".")[0] not in known] == []


@pytest.mark.parametrize("package", HOMES)
def test_every_home_in_the_table_is_lived_in(package: str) -> None:
    importers = {found.importer for found in IMPORTS if starts_with(found.name, package)}
    empty = {place for place in HOMES[package] if not any(lives_in(importer, {place}) for importer in importers)}
    assert empty == set()


def test_torch_starts_at_layer_2() -> None:
    """Commands and the launcher import it late, inside functions."""
    wrong = [
        str(found)
        for found in IMPORTS
        if starts_with(found.name, "torch")
        and home(found.importer) in WITHOUT_TORCH | {""}
        and not (found.typing or (found.late and home(found.importer) in {"cli", "launch"}))
    ]
    assert wrong == []


def test_recipes_and_kernels_are_named_by_the_document_and_never_imported() -> None:
    outside = {"recipes", "ops", "conf", "schemas", "tests"}
    names = {f"dsjob.{name}" for name in outside} | outside
    assert [str(found) for found in IMPORTS if any(starts_with(found.name, name) for name in names)] == []


def test_the_standalone_converter_needs_the_standard_library_alone() -> None:
    wrong = [found for found in IMPORTS if found.importer == STANDALONE]
    assert wrong
    assert [str(found) for found in wrong if found.name.split(".")[0] not in sys.stdlib_module_names] == []


def test_modules_are_named_after_what_they_own() -> None:
    spelled = "deepspeed."  # there DeepSpeed names them
    ours = [module for module in MODULES if not module.startswith(spelled)]
    assert [module for module in ours if set(module.split(".")) & BANNED_NAMES] == []


def test_every_module_opens_with_what_it_owns() -> None:
    silent = [
        name
        for name, path in MODULES.items()
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
