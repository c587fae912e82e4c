"""Jobs that divide layers, and layers and stages, against the same job on one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import dsjob

pytestmark = pytest.mark.slow

SIZES = [
    *("model.layers=2", "model.width=32", "model.context=32", "model.heads=4"),
    *("data.train.context=32", "data.eval.context=32", "trainer.max_steps=20", "trainer.log_every=1"),
    *("trainer.eval_every=10", "trainer.eval_micro_batch=8", "trainer.eval_batches=4", "callbacks=null"),
    *("trainer.train_batch=8", "trainer.micro_batch=null", "optimizer.params.eps=1e-6"),
]


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run of the recipe `quickstart`."""
    done = dsjob("+recipe=quickstart", *SIZES, f"output.dir={folder}", *overrides, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if name in record]


@pytest.mark.parametrize(
    "overrides",
    [
        ["launch.nproc=2", "tensor_parallel.size=2"],
        ["launch.nproc=4", "tensor_parallel.autotp_size=2", "zero_optimization.stage=3", "trainer.eval_batches=2"],
        ["launch.nproc=4", "tensor_parallel.size=2", "pipeline.stages=2", "trainer.grad_accum=2"],
        [
            "launch.nproc=8",
            "tensor_parallel.size=2",
            "pipeline.stages=2",
            "trainer.grad_accum=2",
            "trainer.eval_batches=2",
        ],
    ],
    ids=["tensor", "sharded", "stages", "mesh"],
)
@pytest.mark.full
def test_losses_and_evaluations_equal_those_of_one_process(overrides: list[str], tmp_path: Path) -> None:
    alone, divided = run(tmp_path / "alone"), run(tmp_path / "divided", *overrides)
    for name in ("loss", "grad_norm", "eval/loss"):
        assert read(divided, name) == pytest.approx(read(alone, name), rel=2e-5), name


@pytest.mark.full
def test_a_run_on_the_mesh_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    small = [*("model.layers=2", "model.width=32", "trainer.eval_batches=1", "callbacks=null", "bf16.enabled=false")]
    first = dsjob(
        "+recipe=mesh_gpt", *small, "trainer.max_steps=4", "trainer.log_every=1", "output.dir=mesh", cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert "8 ranks = 2 pipe x 2 data x 2 tensor" in first.stdout
    assert "stage 1  [4 5] [6 7]" in first.stdout
    found = []
    for layout in ([], ["launch.nproc=1", "pipeline.stages=1", "tensor_parallel.size=1"]):
        folder = tmp_path / f"with-{len(layout)}"
        shutil.copytree(tmp_path / "mesh", folder)
        again = dsjob("run", str(folder), "trainer.max_steps=8", *layout, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.append([record["loss"] for record in records if "loss" in record and record["step"] > 4])
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-5)
