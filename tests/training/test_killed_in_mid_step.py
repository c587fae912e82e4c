"""kill -9 between the micro steps of one optimizer step: gradients that were half added up leave no trace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import killed_model
import pytest
from jobs import list_commits, read_metrics
from killed import Killable

pytestmark = pytest.mark.slow
MICRO, STEPS = 3, 9


def make(folder: Path, world: int, stage: int) -> Path:
    document = killed_model.describe(world, stage, STEPS, every=4, keep=0)
    document["trainer"] |= {"train_batch": 2 * MICRO * world, "grad_accum": MICRO}
    folder.mkdir()
    (folder / "cfg.json").write_text(json.dumps(document))
    shutil.copy(str(killed_model.__file__), folder)
    return folder


def run(folder: Path, **env: str) -> tuple[int, str]:
    with Killable("cfg.json", cwd=folder, **env) as job:
        return job.wait(), job.errors


def read_end(folder: Path) -> tuple[Any, Any]:
    """Digests of all chunks, and the plain state, after the last step."""
    root = folder / "run" / "checkpoints"
    saved = next(root.glob(f"step-{STEPS:08d}-a*"))
    tensors = json.loads((saved / "manifest.json").read_text())["tensors"]
    digests = {name: [chunk["sha256"] for chunk in tensor["chunks"]] for name, tensor in tensors.items()}
    return digests, json.loads((saved / "state.json").read_text())


@pytest.mark.parametrize(("world", "stage", "ranks"), [(1, 0, "*"), (1, 2, "*"), (2, 0, "1"), (2, 0, "*"), (2, 2, "0")])
@pytest.mark.full("2-0-*", "2-0-1", "1-2-*", "2-2-0")
def test_a_step_that_was_cut_between_its_micro_steps_is_taken_anew(
    tmp_path: Path, world: int, stage: int, ranks: str
) -> None:
    whole, cut = make(tmp_path / "whole", world, stage), make(tmp_path / "cut", world, stage)
    assert run(whole)[0] == 0
    # The job begins at step 0 and is cut in step 7 after one micro step, goes on from 4 and is cut in step 6 after two.
    for call in (6 * MICRO + 2, 1 * MICRO + 3):
        code, errors = run(cut, **{killed_model.KILL: f"{ranks}:{call}"})
        assert code != 0
        assert "Traceback" not in errors
        assert list_commits(cut / "run") == ["step-00000004"]
    code, errors = run(cut)
    assert code == 0, errors
    assert read_end(cut) == read_end(whole)
    for key in ("loss", "grad_norm", "lr"):
        assert read_metrics(cut / "run", key) == read_metrics(whole / "run", key)
