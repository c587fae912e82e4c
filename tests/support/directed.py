"""Metrics of jobs of `small_jobs` that say, or do not say, whether lower or higher values are better."""

from __future__ import annotations

from typing import Any

import torchmetrics


class Count:
    """1, 2, 3, ... in the evaluations of a run."""

    def __init__(self) -> None:
        self.calls = 0

    def reset(self) -> None:
        pass

    def update(self, outputs: Any, batch: Any) -> None:
        pass

    def compute(self) -> float:
        self.calls += 1
        return float(self.calls)


class Rising(Count):
    higher_is_better = True


class Falling(Count):
    higher_is_better = False


def constant(outputs: Any, batch: Any) -> float:
    return 1.0


def count_low(outputs: Any, batch: Any) -> float:
    return 1.0


count_low.higher_is_better = False  # type: ignore[attr-defined]


def make_collection() -> torchmetrics.MetricCollection:
    return torchmetrics.MetricCollection(
        {"f1": torchmetrics.F1Score(task="binary"), "far": torchmetrics.MeanSquaredError()}
    )
