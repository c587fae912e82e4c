"""Fixtures for programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from executed import TRAIN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path
