"""The pages of docs/: their sessions run, their code compiles, their documents are valid."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from documentation import DOCS, matches, read_blocks, run_page

README = DOCS.parent / "README.md"
PAGES = sorted([*DOCS.glob("guides/*.md"), *DOCS.glob("explanation/*.md"), README])
LANGUAGES = {"", "console", "sh", "python", "yaml", "json", "text", "lua"}
WITH_SESSIONS = [page for page in PAGES if any(block.language == "console" for block in read_blocks(page))]


def name(page: Path) -> str:
    return page.stem


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SESSIONS, ids=name)
def test_the_sessions_of_a_page_run_as_they_are_shown(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_and_documents_of_a_page_can_be_read(page: Path) -> None:
    for block in read_blocks(page):
        assert block.language in LANGUAGES, f"a block says {block.language!r}; support/documentation.py says what runs"
        if block.language == "python":
            compile(block.text, str(page), "exec")
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 900


@pytest.mark.parametrize("page", [README, README.with_name("CONTRIBUTING.md")], ids=name)
def test_links_outside_the_site_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]*))?\)", page.read_text())
    assert links
    for path, heading in links:
        text = (page.parent / path).read_text()
        headings = [re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-") for line in text.splitlines()]
        assert not heading or heading in headings, f"{path}#{heading}"


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("step 3  loss 1.25\n", "step 3   loss 9.5e-03\n", True),  # numbers and spaces differ
        ("step 3\n...\ndone\n", "step 3\neval\nsaved\ndone\n", True),
        ("saved ... here\n", "saved the file here\n", True),
        ("", "anything\n", True),  # nothing is shown, so nothing is promised
        ("step 3\n", "step 3\ndone\n", False),
        ("step 3\ndone\n", "done\nstep 3\n", False),
        ("...\ndone\n", "failed\n", False),
    ],
)
def test_output_is_compared_but_for_its_numbers(shown: str, printed: str, expected: bool) -> None:
    assert matches(shown, printed) is expected
