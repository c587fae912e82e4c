"""The recipes with two models: that they learn, and what their steps compute."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import dsjob, read_metrics

from dsjob.engine.rhythm import Rhythm
from dsjob.errors import ContractError
from dsjob.recipes import gan
from dsjob.recipes.vision import build

pytest.importorskip("sklearn")


@pytest.mark.slow
def test_a_student_learns_from_its_teacher(tmp_path: Path) -> None:
    done = dsjob("+recipe=distill_digits", "output.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "student" in done.stdout
    assert read_metrics(tmp_path / "run", "eval/accuracy")[450] > 0.85
    assert read_metrics(tmp_path / "run", "eval/teacher_accuracy")[450] > 0.9
    assert dsjob("convert", "--model", "student", "run", "out", cwd=tmp_path).returncode == 0
    from safetensors.torch import load_file

    build(width=4).load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["launch.nproc=2"], marks=pytest.mark.full),
        pytest.param(["launch.nproc=2", "zero_optimization.stage=2", "bf16.enabled=true"], marks=pytest.mark.full),
        ["models.discriminator.fp16.enabled=true", "models.generator.model.latent=32", "trainer.max_epochs=20"],
    ],
)
@pytest.mark.full("options0")
def test_a_generator_comes_nearer_to_real_digits(tmp_path: Path, options: list[str]) -> None:
    done = dsjob("+recipe=gan_digits", "output.dir=run", "trainer.max_epochs=30", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    distances = list(read_metrics(tmp_path / "run", "eval/distance").values())
    assert distances[-1] < 0.85 * distances[0]


def test_a_generator_does_not_train_with_accumulation() -> None:
    told = SimpleNamespace(rhythm=Rhythm(micro_batch=1, accumulation=2, data_size=1))
    with pytest.raises(ContractError, match="accumulated"):
        gan.step({"generator": told, "discriminator": told}, {"images": torch.zeros(1, 1, 8, 8)})
