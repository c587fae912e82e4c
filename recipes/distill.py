"""Distillation: a student learns from the labels and from its teacher's predicted probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F


def step(
    engines: Mapping[str, Any], batch: dict[str, Tensor], temperature: float = 2.0, share: float = 0.5
) -> dict[str, Tensor]:
    """Trains `teacher`, unless it has no optimizer, and `student` on a batch.

    The student's loss is Hinton's: (1 - share) x its own + share x T^2 x KL(teacher || student), both softened by T.
    Both models return `logits`, [B, classes], and `loss`, a scalar.

    Returns:
        `loss`, the student's, and the `teacher`'s own.
    """
    teacher, student = engines["teacher"], engines["student"]
    taught = teacher(**batch)
    if teacher.optimizer is not None:
        teacher.backward(taught["loss"])
        teacher.step()
    outputs = student(**batch)
    wanted = F.log_softmax(taught["logits"].detach().float() / temperature, dim=-1)
    said = F.log_softmax(outputs["logits"].float() / temperature, dim=-1)
    distance = F.kl_div(said, wanted, log_target=True, reduction="batchmean") * temperature**2
    loss = (1 - share) * outputs["loss"] + share * distance
    student.backward(loss)
    student.step()
    return {"loss": loss, "teacher": taught["loss"]}


def evaluate(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The student's `loss` on a batch, and the `accuracy` of both: scalars from 0 to 1."""
    outputs = {name: engine(**batch) for name, engine in engines.items()}
    right = {name: (o["logits"].argmax(dim=-1) == batch["labels"]).float().mean() for name, o in outputs.items()}
    return {
        "loss": outputs["student"]["loss"],
        "accuracy": right["student"],
        "teacher_accuracy": right["teacher"],
    }
