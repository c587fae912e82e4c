"""A run refuses what validate reports: both look at a document in the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, write_json

import dsjob
from dsjob.errors import DocumentError, Problem

WRONG: dict[str, Any] = {
    "model": {"_target_": "os.system"},
    "trainer": {"micro_batch": 4, "max_steps": -1},
    "zero_optimization": {"stagee": 1},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("raise SystemError('imported')\nData = None\n")
    monkeypatch.chdir(tmp_path)


def refuse(do: Any) -> list[Problem]:
    """The problems that a call raises for the file."""
    with pytest.raises(DocumentError) as caught:
        do("cfg.json")
    return [*caught.value.problems, *caught.value.warnings]


def test_a_run_and_a_plan_refuse_all_that_validate_reports() -> None:
    write_json(Path("cfg.json"), make_job(**WRONG))
    found = [replace(problem, severity="error") for problem in dsjob.validate("cfg.json")]  # a flag may trust a target
    assert [problem.dotted for problem in found] == ["model._target_", "trainer.max_steps", "zero_optimization.stagee"]
    assert refuse(dsjob.run) == refuse(dsjob.plan) == found


def test_a_folder_of_another_job_is_refused_with_the_place_of_its_name(tmp_path: Path) -> None:
    theirs = tmp_path / "run" / "checkpoints" / "commits"
    theirs.mkdir(parents=True)
    (theirs / "1.json").touch()
    write_json(tmp_path / "run" / "resolved.json", {"model": {"_target_": "theirs.Net"}})
    write_json(Path("cfg.json"), make_job(output={"dir": "run"}))
    (problem,) = refuse(dsjob.run)
    assert problem in dsjob.validate("cfg.json")
    assert problem.place == "cfg.json:22:5"
    assert "holds the run of another job: its model is theirs.Net" in problem.message
