"""Fixtures for jobs of `small_jobs`: what a test hooks in is gone after it, and a run that nothing has interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def hooks() -> Iterator[list[Any]]:
    """What is called with each log record."""
    import small_jobs  # torch, which most tests do without

    yield small_jobs.MORE
    small_jobs.MORE.clear()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption."""
    from small_jobs import train

    folder = tmp_path_factory.mktemp("whole")
    train(folder, checkpoint={"every": 1, "keep": 0})
    return folder
