"""What jobs of `small_jobs` evaluate with: code that fails, code that remembers."""

from __future__ import annotations

from typing import Any

import torch
from small_jobs import Data, Net
from torch import Tensor


def fail(*_: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def evaluate(engines: Any, batch: Any) -> dict[str, Any]:
    return {"loss": engines.first(*batch), "accuracy": 0.5}


def rate(engines: Any, batch: Any) -> dict[str, Any]:
    return {"score": engines.first(*batch)}


class Broken(Data):
    def __getitem__(self, index: int) -> Any:
        raise ZeroDivisionError("on purpose")


class Noisy(Data):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__(n=40, noisy=True)


class Quiet(torch.utils.data.TensorDataset):
    """Draws none."""

    def __init__(self) -> None:
        x = Data(n=16).x
        super().__init__(x, x.sum(1, keepdim=True))


def read_once() -> Any:
    """Four samples, of which a batch would take all."""
    return iter([(sample.x[0], sample.x[0].sum(0, keepdim=True)) for sample in [Data(n=1)] * 4])


class Counting(Net):
    """Counts its batches in a buffer, also while it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, y)


class Seen:
    """The number of batches that it was called with, so that the greatest is the last: it gives the mean of 1..n."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, batch: Any) -> float:
        self.calls += 1
        return float(self.calls)


class Fixed(Seen):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("on purpose")


class FailingLate(Seen):
    """Fails with the second batch, which no rehearsal comes to."""

    def __call__(self, outputs: Any, batch: Any) -> float:
        if super().__call__(outputs, batch) > 1:
            raise ZeroDivisionError("on purpose")
        return 1.0


def measure_size(engines: Any, batch: Any) -> dict[str, float]:
    """The number of samples in a batch; its mean over samples is the sum of its squares by its sum."""
    return {"loss": float(len(batch[0]))}
