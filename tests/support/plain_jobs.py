"""Jobs over modules of plain torch, whose documents say what they are called with; and the same by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import token_jobs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob.data.order import SampleOrder
from dsjob.ranks.seeding import seed_rng

WIDTH, STEPS, BATCH = 6, 3, 8
RATES = {"lr": 0.1, "momentum": 0.9}


class TwoHeads(nn.Module):
    """Two outputs of the kind `form`: classes [samples, 3] and scores [samples, 1]. It knows no loss."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.form = form
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh())
        self.classes, self.score = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, image: Tensor, scale: Tensor) -> Any:
        hidden = self.body(image) * scale
        classes, score = self.classes(hidden), self.score(hidden)
        return {"dict": {"classes": classes, "score": score}, "tuple": (classes, score), "tensor": classes}[self.form]


class Sample(NamedTuple):
    image: Tensor
    scale: Tensor
    label: Tensor
    score: Tensor


class Samples(torch.utils.data.Dataset[Any]):
    """Samples as a `form`: dict, nested (dicts in a dict), tuple or named (a namedtuple). A third of the labels are
    -100, among them those of several neighbours."""

    def __init__(self, n: int = 24, seed: int = 0, form: str = "dict") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.form = form
        self.image = torch.randn(n, WIDTH, generator=generator)
        self.scale = torch.rand(n, 1, generator=generator) + 0.5
        self.label = torch.randint(0, 3, (n,), generator=generator)
        self.label[torch.rand(n, generator=generator) < 0.3] = -100
        self.label[4:8] = -100
        self.score = torch.randn(n, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, i: int) -> Any:
        sample = Sample(self.image[i], self.scale[i], self.label[i], self.score[i])
        nested = {"inputs": {"image": sample.image, "scale": sample.scale}, "label": sample.label}
        return {"dict": sample._asdict(), "nested": nested, "tuple": tuple(sample), "named": sample}[self.form]


def make_document(folder: str | Path, *, batch: str = "dict", output: str = "dict", **sections: Any) -> dict[str, Any]:
    """A job of STEPS steps, with samples and outputs of these forms, evaluated at its end."""
    data = {"_target_": "plain_jobs.Samples", "form": batch}
    return token_jobs.make_document(
        str(folder),
        **{
            "model": {"_target_": "plain_jobs.TwoHeads", "form": output},
            "data": {"train": data, "eval": {**data, "n": 11, "seed": 1}},
            "optimizer": {"type": "SGD", "params": RATES},
            **sections,
        },
    )


Losses = Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, tuple[float, Tensor]]]


def both(classes: Tensor, score: Tensor, label: Tensor, given: Tensor) -> dict[str, tuple[float, Tensor]]:
    """Two losses by name, each with its weight."""
    return {"class": (0.7, F.cross_entropy(classes, label)), "score": (2.0, F.mse_loss(score, given))}


def classify(classes: Tensor, score: Tensor, label: Tensor, given: Tensor) -> dict[str, tuple[float, Tensor]]:
    """The loss of the classes alone."""
    return {"class": (1.0, F.cross_entropy(classes, label))}


def train_by_hand(
    losses: Losses, dtype: torch.dtype = torch.float32
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Plain PyTorch on whole batches: the losses of each step and, last, of the evaluation; and the weights."""
    seed_rng(42)
    model, data, evaluation = TwoHeads("tuple"), Samples(), Samples(11, 1)
    optimizer = torch.optim.SGD(model.parameters(), **RATES)
    order = SampleOrder(len(data), 42, True)
    found = []

    def measure(data: Samples, index: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            outputs = model(data.image[index], data.scale[index])
        named = losses(*(each.float() for each in outputs), data.label[index], data.score[index])
        total = sum((weight * loss for weight, loss in named.values()), torch.zeros(()))
        found.append({"loss": total.item(), **{name: loss.item() for name, (_, loss) in named.items()}})
        return total

    for step in range(STEPS):
        measure(data, order.take(step * BATCH, BATCH)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    measure(evaluation, slice(None))
    return found, {name: p.detach() for name, p in model.named_parameters()}


def compare(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A loss function of outputs and batch."""
    return F.mse_loss(outputs["score"], batch["score"])


def compare_both(score: Tensor, classes: Tensor, given: Tensor, label: Tensor) -> Tensor:
    """A loss function of two predictions and two targets."""
    return F.mse_loss(score, given) + F.cross_entropy(classes, label)
