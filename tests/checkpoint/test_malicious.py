"""Checkpoints made to do harm: every reader refuses them in words or is not impressed, with little memory, without
running or writing anything."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from malicious import CASES, REFUSED, SOME
from programs import clean_env, run_program

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.full)])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What attacked.py tells of some of the cases, or all."""
    memory = Path("/dev/shm")  # a file system that needs not wait for a disk, where there is one
    folder = Path(tempfile.mkdtemp(dir=memory)) if memory.is_dir() else tmp_path_factory.mktemp("attacked")
    command = [sys.executable, SUPPORT / "attacked.py", folder, request.param]
    try:
        done = run_program(command, env=clean_env(PYTHONPATH=str(SUPPORT)), cwd=folder, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        assert not list(folder.rglob("pwned"))
    finally:
        shutil.rmtree(folder)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["results"].keys() == (CASES.keys() if request.param == "all" else set(SOME))
    return found


def test_there_are_many() -> None:
    assert len(CASES) >= 200
    assert len(REFUSED) >= 200
    assert len(REFUSED & set(SOME)) >= 100


@pytest.mark.slow
def test_errors_are_of_the_project(report: dict[str, Any]) -> None:
    other = [
        f"{case}: {reader}: {what}"
        for case, readers in report["results"].items()
        for reader, what in readers.items()
        if what not in ("ok", "refused")
    ]
    needed = "320 MB for the model: weights: MemoryError: "  # the bytes are there, and all are asked for
    assert [line for line in other if line != needed] == []
    readers = Counter(len(readers) for readers in report["results"].values())
    assert list(readers) == [10]


@pytest.mark.slow
def test_nothing_runs_and_nothing_is_written_outside(report: dict[str, Any]) -> None:
    assert report["events"] == []


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["convert", "script", "copy", "verify", "diff", "load", "weights"])
def test_what_is_wrong_is_refused(report: dict[str, Any], reader: str) -> None:
    results = report["results"]
    assert [case for case in results if case in REFUSED and results[case][reader] != "refused"] == []
