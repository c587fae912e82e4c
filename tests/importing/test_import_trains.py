"""An imported job trains as HF's Trainer does: losses, best checkpoint and weights are equal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_texts
from safetensors.torch import load_file
from torch import Tensor, nn

import dsjob

SAMPLES = 16  # those of one step, so that their order does not matter
ARGUMENTS: dict[str, Any] = {
    "do_train": True,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "max_steps": 12,
    "learning_rate": 0.05,
    "weight_decay": 0.01,
    "adam_beta2": 0.99,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "label_smoothing_factor": 0.1,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "hits",
    "greater_is_better": True,
    "use_cpu": True,
    "report_to": [],
    "seed": 3,
}


class Classifier(nn.Module):
    """logits: [samples, classes]."""

    config = None  # the Trainer looks for one

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(torch.tanh(self.inner(x)))}  # both smooth the labels and compute the loss


def build_data(seed: int = 0, samples: int = SAMPLES) -> list[dict[str, Tensor]]:
    """Random samples: the evaluation improves for some steps, by chance, and then does not."""
    random = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(6, generator=random), "labels": torch.randint(3, (), generator=random)}
        for _ in range(samples)
    ]


def hits(outputs: Any, batch: Any) -> Tensor:
    """The share of samples whose class is predicted."""
    return (outputs["logits"].argmax(-1) == batch["labels"]).float().mean()


def test_an_imported_job_equals_the_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    told = {**ARGUMENTS, "output_dir": str(tmp_path / "trainer"), "remove_unused_columns": False}

    def count(found: Any) -> dict[str, float]:
        return {"hits": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    torch.manual_seed(3)
    model = Classifier()
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(**told, disable_tqdm=True), train_dataset=build_data(),
        eval_dataset=build_data(1, 20), compute_metrics=count,
    )  # fmt: skip
    trainer.train()

    imported = import_texts(tmp_path, {"args.json": {**told, "output_dir": str(tmp_path / "job")}})
    here = "test_import_trains"
    job = imported.document
    job["model"] = {"_target_": f"{here}.Classifier"}
    job["data"] |= {
        "train": {"_target_": f"{here}.build_data"},
        "eval": {"_target_": f"{here}.build_data", "seed": 1, "samples": 20},
    }
    job["metrics"] = {"hits": {"_target_": f"{here}.hits"}}
    sys.modules.setdefault(here, sys.modules[__name__])
    result = dsjob.run(job, trust=[here])

    assert result.step == 12
    theirs = [entry for entry in trainer.state.log_history if "eval_hits" in entry]
    ours = [entry for entry in result.history if "eval/hits" in entry]
    assert [entry["eval/hits"] for entry in ours] == pytest.approx([entry["eval_hits"] for entry in theirs])
    assert len({entry["eval_hits"] for entry in theirs}) > 2
    # The Trainer smooths the loss of evaluations too.
    assert [entry["eval/loss"] for entry in ours] == pytest.approx([entry["eval_loss"] for entry in theirs], rel=1e-4)
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [entry["loss"] for entry in result.history if "lr" in entry] == pytest.approx(
        [loss for loss, _ in logged], rel=1e-3
    )
    assert 2 <= trainer.state.best_global_step < 12
    theirs_at_best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    ours_at_best = dsjob.load_model(result.run_dir, best=True, trust=[here]).state_dict()
    for name, value in theirs_at_best.items():
        torch.testing.assert_close(ours_at_best[name], value, rtol=1e-3, atol=1e-4)
