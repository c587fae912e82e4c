"""Two models that train together: what a job of several names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Points(Dataset[dict[str, Tensor]]):
    """Points of the plane, and twice their sum."""

    def __init__(self, count: int = 64) -> None:
        self.x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": 2 * self.x[index].sum()}


class Line(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.layers(x).squeeze(1)


def step(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The teacher learns the target, unless it has no optimizer; the student what the teacher says."""
    teacher, student = engines["teacher"], engines["student"]
    taught = teacher(**batch)
    target_loss = F.mse_loss(taught.float(), batch["y"])
    if teacher.optimizer is not None:
        teacher.backward(target_loss)
        teacher.step()
    loss = F.mse_loss(student(**batch).float(), taught.detach().float())
    student.backward(loss)
    student.step()
    return {"loss": loss, "teacher": target_loss}


def forgetful(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    return F.mse_loss(engines["teacher"](**batch), batch["y"])


def twice(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    step(engines, batch)
    return step(engines, batch)


def uneven(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    loss = F.mse_loss(engines["student"](**batch), batch["y"])
    engines["student"].backward(loss)
    engines["student"].step()
    if engines["student"].rhythm.micro_steps % 4 == 1:
        other = F.mse_loss(engines["teacher"](**batch), batch["y"])
        engines["teacher"].backward(other)
        engines["teacher"].step()
    return loss


def named_by_rank(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    found = step(engines, batch)
    return {**found, f"of_{engines['student'].world.data_rank}": 1.0}


def named_as_lr(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    return {**step(engines, batch), "lr": 1.0}


def now_and_then(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    found = step(engines, batch)
    return {**found, "extra": 1.0} if engines["student"].rhythm.micro_steps % 2 else found


def in_another_order(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    found = {"loss": step(engines, batch)["loss"], "a": 1.0, "b": 3}
    return found if engines["student"].world.data_rank else dict(reversed(found.items()))


def evaluate(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    """The mean of the inputs: of uneven batches it has to be weighted."""
    return {"loss": F.mse_loss(engines["student"](**batch), batch["y"]), "mean": batch["x"].mean()}


def student_alone(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    loss = F.mse_loss(engines["student"](**batch).float(), batch["y"])
    engines["student"].backward(loss)
    engines["student"].step()
    return loss


def wordy(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    step(engines, batch)
    return {"loss": "small"}


def alone(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Tensor:
    engine = engines["model"]
    loss = F.mse_loss(engine(**batch), batch["y"])
    engine.backward(loss)
    engine.step()
    return loss


def without_loss(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> Any:
    return {"accuracy": 1.0}
