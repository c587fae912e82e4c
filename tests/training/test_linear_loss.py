"""dsjob.linear_cross_entropy as the loss of a job: the numbers of plain PyTorch, at every stage."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import token_jobs
import torch
from ranks import run_ranks
from torch import Tensor

from dsjob.ranks.mesh import World

LOSS = {
    "model": {"_target_": "token_jobs.HeadApart"},
    "outputs": {"hidden": "hidden", "weight": "weight", "bias": "bias"},
    "targets": {"target": "labels"},
    "loss": {"_target_": "dsjob.linear_cross_entropy"},
}


def run_stages(world: World, folder: str) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    def run(stage: int) -> Any:
        document = token_jobs.make_document(tempfile.mkdtemp(dir=folder), stage=stage, micro_batch=2, **LOSS)
        return token_jobs.run(document, world)

    return [run(stage) for stage in range(4)]


def test_a_job_trains_with_it(tmp_path: Path) -> None:
    """On two ranks with two micro batches each, whose numbers of targets differ."""
    losses, _, evaluated, weights = token_jobs.train_by_hand()
    first, second = run_ranks(run_stages, 2, str(tmp_path))
    for records, ends in first:
        assert [record["loss"] for record in records if "loss" in record] == pytest.approx(losses, rel=1e-5)
        assert records[-1]["eval/loss"] == pytest.approx(evaluated, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(ends[name], weight, rtol=1e-4, atol=1e-5)
    assert len(second) == 4
