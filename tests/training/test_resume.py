"""Hyperparameters that have changed since the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_documents import resolve as resolve_document
from small_jobs import TRUST, make_document

from dsjob import storage
from dsjob.document import resolve
from dsjob.errors import UsageError
from dsjob.ranks.mesh import join_world
from dsjob.training import job


def make(folder: Path, steps: int, rate: float) -> Any:
    trainer = {"micro_batch": 8, "max_steps": steps}
    sgd = {"type": "SGD", "params": {"lr": rate}}
    return resolve.complete_job(
        resolve_document(make_document(folder, scheduler=None, optimizer=sgd, trainer=trainer, callbacks={}))
    )


def test_a_resume_needs_no_deepspeed_config_of_the_checkpoints_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage.make_folder(str(tmp_path))
    world = join_world(device="cpu")
    job.run_job(make(tmp_path, 1, 0.1), str(tmp_path), world, TRUST)
    further = make(tmp_path, 2, 0.2)

    def refuse(*_: Any) -> None:
        raise UsageError("a section that this version does not know")

    monkeypatch.setattr(resolve, "complete_config", refuse)
    capsys.readouterr()
    job.run_job(further, str(tmp_path), world, TRUST)
    told = capsys.readouterr()
    assert "since the checkpoint: optimizer.params.lr 0.1 -> 0.2" in told.out + told.err


def test_changes_of_data_model_and_loss_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage.make_folder(str(tmp_path))
    world = join_world(device="cpu")
    first = make(tmp_path, 1, 0.1)
    job.run_job(first, str(tmp_path), world, TRUST)
    train = first.document["data"]["train"]
    changed = {**train, "n": 48}
    second = resolve.complete_job(
        {**first.document, "data": {**first.document["data"], "train": changed, "shuffle": False}}
    )
    capsys.readouterr()
    job.run_job(second, str(tmp_path), world, TRUST)
    told = capsys.readouterr()
    said = " ".join((told.out + told.err).split())
    assert "since the checkpoint: data.train.n null -> 48, data.shuffle true -> false" in said
    assert "step 1 of 1: nothing was trained or evaluated" in said
