"""The site builds without a warning: every link, every docstring, every command's help."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from documentation import DOCS
from programs import run_program

import dsjob

needs_sphinx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")), reason="needs pip install '.[docs]'"
)


def build(folder: Path, *options: str) -> Path:
    command = [sys.executable, "-P", "-m", "sphinx", "-W", "--keep-going", "-q", *options, str(DOCS), str(folder)]
    built = run_program(command, cwd=folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site in Sphinx's plain theme: its own takes half of the time."""
    return build(tmp_path_factory.mktemp("site"), "-D", "html_theme=basic")


@needs_sphinx
@pytest.mark.slow
@pytest.mark.full
def test_the_site_builds_in_its_own_theme(tmp_path: Path) -> None:
    assert "furo" in (build(tmp_path) / "index.html").read_text()


@needs_sphinx
@pytest.mark.slow
def test_the_site_has_a_page_for_every_markdown_file(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert len(pages) > 50
    assert [str(page) for page in pages if not (site / page).exists()] == []


@needs_sphinx
@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "texts"),
    [
        ("reference/cli.html", ["usage: dsjob validate", "usage: dsjob ckpt verify", "--explain RULE"]),
        (
            "reference/python.html",
            ["dsjob.initialize", "errors.ConfigError", "FP16Config", "on_eval", "Engine.save_checkpoint"],
        ),
        ("reference/index.html", ["zero_optimization.html"]),
    ],
)
def test_the_reference_is_made_from_the_code(site: Path, page: str, texts: list[str]) -> None:
    html = (site / page).read_text()
    assert [text for text in texts if text not in html] == []


@needs_sphinx
@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    html = (site / "reference/python.html").read_text()
    names = {f"dsjob.{name}" for name in dsjob.__all__} - {"dsjob.__version__"}
    assert [name for name in names if f'id="{name}"' not in html and f'id="module-{name}"' not in html] == []
