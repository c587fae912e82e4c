"""A reader who follows the tutorial, file by file and command by command, sees what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation import DOCS, run_page

TUTORIAL = DOCS / "tutorial/index.md"


@pytest.mark.slow
def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    run_page(TUTORIAL, tmp_path)
