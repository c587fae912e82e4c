"""Models of images and a loss of torch, from a document alone: the same numbers as a loop written by hand.

torchvision and timm have no build for every torch, so no extra of dsjob's installs them. Where they are missing, two
models of the same kind remain: residual blocks with batch norm, and a vision transformer of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import image_jobs
import pytest
import token_jobs
import torch
from ranks import run_ranks

from dsjob.ranks.mesh import World
from dsjob.trust.grant import Trust, check_document


@pytest.mark.parametrize("model", image_jobs.MODELS)
def test_a_model_of_images_trains_as_by_hand(tmp_path: Path, model: str) -> None:
    if missing := image_jobs.lacks_library(model):
        pytest.skip(missing)
    document = image_jobs.make_document(tmp_path / "run", model)
    assert check_document({"model": document["model"]}, Trust(local=False)) == [] or model == "blocks"
    expected, accuracy, weights = image_jobs.train_by_hand(model)
    (*records, last), ends = token_jobs.run(document)
    assert [record["loss"] for record in records] == pytest.approx(expected[:-1], abs=1e-6)
    assert last["eval/loss"] == pytest.approx(expected[-1], abs=1e-5)
    assert last["eval/accuracy"] == pytest.approx(accuracy)
    for name, weight in weights.items():
        torch.testing.assert_close(ends[name], weight, rtol=0, atol=1e-5)


def train_on_ranks(world: World, folder: str, model: str, stage: int) -> tuple[list[dict[str, float]], Any]:
    return token_jobs.run(image_jobs.make_document(folder, model, stage=stage, micro_batch=4), world)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.full("0")
def test_sharded_over_two_ranks(tmp_path: Path, stage: int) -> None:
    """A vision transformer has no statistics of batches, so its numbers are those of one process."""
    expected, accuracy, weights = image_jobs.train_by_hand("transformers")
    for rank, (found, ends) in enumerate(run_ranks(train_on_ranks, 2, str(tmp_path), "transformers", stage)):
        for name, weight in weights.items():
            torch.testing.assert_close(ends[name], weight, rtol=0, atol=1e-5)
        if rank == 0:
            *records, last = found
            assert [record["loss"] for record in records] == pytest.approx(expected[:-1], abs=1e-5)
            assert last["eval/loss"] == pytest.approx(expected[-1], abs=1e-5)
            assert last["eval/accuracy"] == pytest.approx(accuracy)
