"""The rules of imports: an import leads to a room below, nothing goes in circles, a third party has one home."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dsjob"
OPS = PACKAGE.parent / "ops"  # dsjob.ops

# The rooms of dsjob/ from the ground up: an import leads to a floor below. `dsjob` itself only points at them.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("terminal",),
    ("after_import", "errors", "home"),
    ("console", "contract", "files"),
    ("storage", "planning", "pipelines"),
    ("run_folder", "document", "provenance"),
    ("config", "importing", "trust"),
    ("torch_private",),
    ("ops",),
    ("ranks",),
    ("compute", "data", "monitors"),
    ("optim", "checkpointing", "text"),
    ("parallel", "checkpoint"),
    ("engine",),
    ("callbacks",),
    ("deepspeed", "training"),
    ("launch",),
    ("front", "programs"),
    ("report",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Rooms inside a room, from the ground up.
INNER = {
    "checkpoint": ("format", "root", "pretrained", "other", "live", "offline"),
}
# Torch takes seconds to import: what starts or reads a job without training it does without.
WITHOUT_TORCH = {room for room, floor in FLOOR_OF.items() if floor < FLOOR_OF["torch_private"]} | {
    "cli",
    "front",
    "report",
    "__main__",
    "launch.launcher",
    "launch.rank",
    "launch.devices",
    "launch.relay",
    "launch.supervisor",
    "launch.surroundings",
    "programs.alias",
    "programs.folder",
    "programs.launch",
    "programs.rank",
    "ranks.failures",
    "ranks.loopback",
    "ranks.patience",
    "ranks.signals",
    "ranks.stalls",
    "training.advice",
    "training.failed_starts",
    "training.form",
}

# Who may import a third party, at whatever level.
HOMES: dict[str, set[str]] = {
    "hydra": {"document.compose", "document.hydra_errors", "cli.sweep"},
    "omegaconf": {"document.compose", "document.hydra_errors", "document.interpolation", "cli.sweep"},
    "jsonschema": {"contract.check"},
    "aiohttp": {"storage"},
    "fsspec": {"storage"},
    "safetensors": {"checkpoint"},
    "torch.distributed.checkpoint": {"checkpoint"},
    "rich": {"console", "training.display", "cli.bar"},
    "rich.console": {"console"},
    "rich.table": {"console"},
    "rich.text": {"console"},
    "yaml": {"document", "document.hydra_errors", "cli.output"},
    "deepspeed": {"engine.driven", "engine.driven_state"},
    "setuptools": {"ops.compiling"},
    "torchmetrics": {"text.metrics"},
    "wandb": {"monitors.wandb"},
    "comet_ml": {"monitors.comet"},
    "mlflow": {"monitors.mlflow"},
    "plotly": {"report.page"},
    "numpy": {"checkpoint", "data", "ranks.seeding", "text"},
    "transformers": {
        "checkpoint.pretrained.architecture",
        "trust.model_files",
        "programs.trainer_stop",
        "programs.contradictions",
        "text.tokenizers",
    },
    "datasets": {"text.records"},
    "pyarrow": {"text.records"},
    "accelerate": {"programs.origins", "programs.process_group"},
    "peft": {"checkpoint.pretrained.architecture"},
    "huggingface_hub": {"checkpoint.pretrained.tokenizer"},
}
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
STANDALONE = "checkpoint.format.zero_to_fp32"
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
    for path in OPS.glob("*.py"):
        found["ops" if path.stem == "__init__" else f"ops.{path.stem}"] = path
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


@cache
def list_imports() -> list[Import]:
    """All imports; found at the first use, because each test process collects this file and one runs it."""
    return [found for name, path in MODULES.items() for found in find_imports(name, ast.parse(path.read_text()))]


def own_module(name: str) -> str | None:
    """The module of dsjob/ that a dotted name leads to; None for names outside."""
    first, *inside = name.split(".")
    places = (".".join(inside), ".".join(inside[:-1]))
    return next((place for place in places if place in MODULES), None) if first == "dsjob" else None


def home(module: str) -> str:
    return module.split(".")[0]


def inner_room(module: str) -> str:
    """The second part of a module's name, or nothing for a room itself."""
    return module.split(".")[1] if "." in module else ""


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
    assert len(list_imports()) > 200


def test_every_room_has_a_floor_and_every_name_in_the_table_is_a_room() -> None:
    assert {home(module) for module in MODULES if module} == set(FLOOR_OF)
    assert sum(len(rooms) for rooms in FLOORS) == len(FLOOR_OF)


def test_imports_are_absolute() -> None:
    assert [str(found) for found in list_imports() if found.name.startswith(".")] == []


def test_imports_lead_to_a_floor_below_or_stay_in_their_room() -> None:
    """Late imports count too; those for type checkers count everywhere but in dsjob/__init__.py."""
    wrong = []
    for found in list_imports():
        target = own_module(found.name)
        if not (found.importer and target):
            continue
        above, below = home(found.importer), home(target)
        if above != below and FLOOR_OF[below] >= FLOOR_OF[above]:
            wrong.append(str(found))
    assert wrong == []


@pytest.mark.parametrize("room", INNER)
def test_imports_inside_a_room_lead_to_an_inner_room_below(room: str) -> None:
    floors = {name: floor for floor, name in enumerate(INNER[room])}
    wrong = []
    for found in list_imports():
        target = own_module(found.name)
        if target and home(found.importer) == home(target) == room:
            above, below = (inner_room(module) for module in (found.importer, target))
            if above in floors and below in floors and floors[below] > floors[above]:
                wrong.append(str(found))
    assert wrong == []
    assert {inner_room(module) for module in MODULES if home(module) == room and inner_room(module)} == set(floors)


def test_the_package_itself_imports_nothing_of_its_own_until_asked() -> None:
    early = [found for found in list_imports() if not found.importer and not (found.late or found.typing)]
    assert [str(found) for found in early if own_module(found.name) is not None] == []


def import_graph() -> dict[str, set[str]]:
    """What is executed when a module is imported: the modules it names, and the packages these lie in."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in list_imports():
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
        for found in list_imports()
        for package, places in HOMES.items()
        if starts_with(found.name, package) and not lives_in(found.importer, places)
    ]
    assert wrong == []


def test_every_third_party_is_in_the_table() -> None:
    known = {package.split(".")[0] for package in HOMES} | {"torch", "dsjob"} | set(sys.stdlib_module_names)
    assert [str(found) for found in list_imports() if found.name.split(".")[0] not in known] == []


@pytest.mark.parametrize("package", HOMES)
def test_every_home_in_the_table_is_lived_in(package: str) -> None:
    importers = {found.importer for found in list_imports() if starts_with(found.name, package)}
    empty = {place for place in HOMES[package] if not any(lives_in(importer, {place}) for importer in importers)}
    assert empty == set()


def test_torch_starts_with_its_private_names() -> None:
    """Commands and the launcher import it late, inside functions."""
    wrong = [
        str(found)
        for found in list_imports()
        if starts_with(found.name, "torch")
        and (not found.importer or lives_in(found.importer, WITHOUT_TORCH))
        and not (found.typing or (found.late and home(found.importer) in {"cli", "front", "launch"}))
    ]
    assert wrong == []


def test_recipes_are_named_by_the_document_and_never_imported() -> None:
    outside = {"recipes", "conf", "schemas", "tests"}
    names = {f"dsjob.{name}" for name in outside} | outside | {"ops"}
    assert [str(found) for found in list_imports() if any(starts_with(found.name, name) for name in names)] == []


def test_the_standalone_converter_needs_the_standard_library_alone() -> None:
    wrong = [found for found in list_imports() if found.importer == STANDALONE]
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


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by their names, and cannot collect the second one."""
    names = Counter(path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
