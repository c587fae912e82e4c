"""Modules and files of dsjob that documentation, docstrings and comments name are where they say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from test_layers import FLOOR_OF, FLOORS

ROOT = Path(__file__).parents[2]
# The changelog tells of names that are gone.
PAGES = [path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if path.name != "CHANGELOG.md"]
SOURCES = [path for folder in ("dsjob", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
# Rooms whose name no section of a job document has: `parallel.gloo` can only be a module.
ROOMS = (
    "cli",
    "compute",
    "contract",
    "document",
    "optim",
    "parallel",
    "planning",
    "ranks",
    "training",
    "trust",
)
FILE = re.compile(r"(?<![\w/.-])(?:dsjob|tests|benchmarks|recipes)/[\w/]*\w\.py\b")
NAME = re.compile(r"`(dsjob(?:\.(?!json\b|py\b)\w+)+)(?:\(\))?`")
SHORT = re.compile(rf"`((?:{'|'.join(ROOMS)})(?:\.[a-z_]+)+)`")


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or what one has."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def list_missing(text: str) -> list[str]:
    files = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    return files + [name for name in NAME.findall(text) if not exists(name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_name_what_exists(page: Path) -> None:
    assert list_missing(page.read_text()) == []


def test_docstrings_and_comments_name_what_exists() -> None:
    missing = {}
    for path in SOURCES:
        text = path.read_text()
        short = [name for name in SHORT.findall(text) if not exists(f"dsjob.{name}")]
        if found := list_missing(text) + short:
            missing[str(path.relative_to(ROOT))] = found
    assert missing == {}


def test_the_drawing_of_the_layers_has_every_room_on_its_floor() -> None:
    page = (ROOT / "docs/explanation/design.md").read_text()
    drawing = page.split("```text")[1].split("```")[0]
    # Names stand left of their explanations, which begin in column 34.
    drawn = [set(line[:33].split()) & set(FLOOR_OF) for line in drawing.splitlines()]
    floors = [{room for room in rooms if (ROOT / "dsjob" / room).is_dir()} for rooms in FLOORS]
    found = [FLOOR_OF[min(rooms)] for rooms in drawn if rooms]
    assert found == sorted(found, reverse=True)
    assert set().union(*floors) <= set().union(*drawn)
    assert all(len({FLOOR_OF[room] for room in rooms}) <= 1 for rooms in drawn)


@pytest.mark.parametrize("text", ["`dsjob.parallel.wrap`", "in dsjob/wrap.py,", "`dsjob.Enigne`"])
def test_a_name_that_is_gone_is_found(text: str) -> None:
    assert list_missing(text)
    assert not list_missing("`dsjob.parallel.gloo` in dsjob/parallel/gloo.py, as in `dsjob.Engine`")
