"""Jobs that are judged by F1, in every form that a metric may have; and F1 by hand."""

from __future__ import annotations

import json
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from job_documents import make_job, resolve
from torch import Tensor, nn

from dsjob import storage
from dsjob.document.resolve import complete_job
from dsjob.ranks.mesh import World, join_world
from dsjob.training import job
from dsjob.trust.grant import Trust

TRUST = Trust(folders=(str(Path(__file__).parent),))
DEVICES: list[torch.device] = []


class Judged(nn.Module):
    """Says what its input says: training changes nothing that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = x * self.scale
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Rare(torch.utils.data.Dataset[Any]):
    """Few samples are positive, and few of these are found: the mean of batches' F1 is far from the F1 of all."""

    def __init__(self, n: int = 37, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = (torch.rand(n, generator=generator) < 0.3).long()
        self.x = torch.randn(n, generator=generator) + 0.7 * self.labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def count(preds: Tensor, target: Tensor) -> Tensor:
    """True positives, false positives, false negatives: int64 [3]."""
    found, there = preds > 0, target.bool()
    return torch.stack([(found & there).sum(), (found & ~there).sum(), (~found & there).sum()])


def to_f1(counts: Tensor) -> float:
    right, wrong, missed = counts.tolist()
    return 2 * right / max(2 * right + wrong + missed, 1)


def join_counts(values: list[Tensor]) -> float:
    """F1 of the counts of all batches."""
    return to_f1(torch.stack(values).sum(0))


def list_labels(outputs: Any, batch: dict[str, Tensor]) -> list[int]:
    return batch["labels"].tolist()


def spell(values: list[list[int]]) -> float:
    """A number that tells the order of the data."""
    return float(sum((place + 1) * label for place, label in enumerate(chain.from_iterable(values))))


def accuracy(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return ((outputs["logits"] > 0) == batch["labels"].bool()).float().mean()


def rate(*, preds: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"wrong": preds, "kind": target}


def train(engines: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A micro step of several models that keeps what a metric takes."""
    outputs = engines["one"](**batch)
    engines["one"].backward(outputs["loss"])
    engines["one"].step()
    return {"loss": outputs["loss"], "scores": outputs["logits"]}


def judge(engines: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    outputs = engines["one"](**batch)
    return {"loss": outputs["loss"], "scores": outputs["logits"]}


class F1:
    """An object with update, compute and reset, and nothing to join two of it."""

    def __init__(self) -> None:
        self.counts = torch.zeros(3, dtype=torch.int64)

    def reset(self) -> None:
        self.counts = torch.zeros(3, dtype=torch.int64)

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.counts = self.counts + count(preds, target)

    def compute(self) -> dict[str, float]:
        return {"f1": to_f1(self.counts), "positives": float(self.counts[0] + self.counts[2])}


class Reduced(F1):
    """As Determined's MetricReducer."""

    def per_slot_reduce(self) -> list[int]:
        return self.counts.tolist()

    def cross_slot_reduce(self, per_slot_metrics: list[list[int]]) -> float:
        return to_f1(torch.tensor(per_slot_metrics).sum(0))


class Placed(nn.Module):
    """A loss with a table of its own, which has to be where the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(2))

    def to(self, *args: Any, **kwargs: Any) -> Placed:
        DEVICES.append(args[0])
        return super().to(*args, **kwargs)

    def forward(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return (self.weight[batch["labels"]] * (outputs["logits"] - batch["labels"]).square()).mean()


class Fails(F1):
    """Cannot say what it has found."""

    def compute(self) -> dict[str, float]:
        raise ZeroDivisionError("no positives")


class ByClass(F1):
    def compute(self) -> Any:
        return torch.ones(2)


def make_collection() -> Any:
    """Metrics of torchmetrics, two of which share their state."""
    import torchmetrics

    kinds = torchmetrics.classification
    return torchmetrics.MetricCollection([kinds.BinaryF1Score(), kinds.BinaryRecall(), kinds.BinaryAUROC()])


def make_of_evaluate(folder: str) -> Any:
    """A module of Hugging Face's evaluate."""
    import datasets
    import evaluate

    class LocalF1(evaluate.Metric):
        def _info(self) -> Any:
            features = datasets.Features(
                {"predictions": datasets.Value("float32"), "references": datasets.Value("int32")}
            )
            return evaluate.MetricInfo(description="F1", citation="", inputs_description="", features=features)

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return {"hf": to_f1(count(torch.as_tensor(predictions), torch.as_tensor(references)))}

    return LocalF1(cache_dir=folder, keep_in_memory=True)


METRICS: dict[str, dict[str, Any]] = {
    "torchmetrics": {"_target_": "torchmetrics.F1Score", "task": "binary"},
    "auroc": {
        "_target_": "torchmetrics.classification.BinaryAUROC",
        "inputs": {"preds": "outputs.logits", "target": "batch.labels"},
    },
    "several": {"_target_": "metric_jobs.make_collection", "_partial_": False},
    "own": {"_target_": "metric_jobs.F1"},
    "reducer": {"_target_": "metric_jobs.Reduced"},
    "values": {
        "_target_": "metric_jobs.count",
        "inputs": {"preds": "outputs.logits", "target": "batch.labels"},
        "reduce": {"_target_": "metric_jobs.join_counts"},
    },
    "order": {"_target_": "metric_jobs.list_labels", "reduce": {"_target_": "metric_jobs.spell"}},
    "accuracy": {"_target_": "metric_jobs.accuracy"},
    "loss_mean": {"_target_": "torchmetrics.MeanMetric", "inputs": {"value": "loss"}},
}


def expect(data: Rare) -> dict[str, float]:
    """What the metrics are over all of `data`."""
    counts = count(data.x, data.labels)
    f1, positive, negative = to_f1(counts), data.x[data.labels == 1], data.x[data.labels == 0]
    above = (positive[:, None] > negative).double()
    auroc = float(above.mean()) if above.numel() else 0.0
    right = float(((data.x > 0) == data.labels.bool()).double().mean())
    return {
        "torchmetrics": f1,
        "auroc": auroc,
        "several/BinaryF1Score": f1,
        "several/BinaryRecall": float(counts[0] / max(int(counts[0] + counts[2]), 1)),
        "several/BinaryAUROC": auroc,
        "own/f1": f1,
        "own/positives": float(data.labels.sum()),
        "reducer": f1,
        "values": f1,
        "order": spell([data.labels.tolist()]),
        "accuracy": right,
    }


def make_document(folder: str, *, n: int = 37, **sections: Any) -> dict[str, Any]:
    """A job of two steps, evaluated after each."""
    trainer = {"micro_batch": 4, "max_steps": 2, "log_every": 2, "eval_every": 1, **sections.pop("trainer", {})}
    return make_job(
        **{
            "model": {"_target_": "metric_jobs.Judged"},
            "data": {"train": {"_target_": "metric_jobs.Rare"}, "eval": {"_target_": "metric_jobs.Rare", "n": n}},
            "trainer": trainer,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-12}},
            "metrics": METRICS,
            "checkpoint": {"at_end": False},
            "output": {"dir": folder},
            **sections,
        }
    )


def run(document: dict[str, Any], world: World | None = None) -> list[dict[str, float]]:
    """Runs a job on this rank: what it has logged, where it is rank 0."""
    world = world or join_world(device="cpu")
    resolved = resolve(document, world_size=world.data_size)
    folder = resolved["output"]["dir"]
    storage.make_folder(folder)
    job.run_job(complete_job(resolved), folder, world, TRUST)
    path = Path(folder, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_each(world: World, folder: str, given: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Runs one job after the other on this rank."""
    return [run(make_document(tempfile.mkdtemp(dir=folder), **each), world) for each in given]
