"""Ends a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from dsjob.callbacks.callback import Callback, RunView
from dsjob.errors import ContractError


class EarlyStopping(Callback):
    """Stops training after `patience` evaluations in a row in which `metric` has not improved by more than `min_delta`.

    metric: a name that evaluations return. mode: whether a smaller (`min`) or a greater value (`max`) is better.
    min_delta: at least 0. A value that is not finite counts as no improvement. The counters are part of checkpoints, so
    a run that has stopped early stops again when it is resumed, unless `patience` was increased. Raises ContractError
    for invalid arguments, and if an evaluation returns no such metric.
    """

    def __init__(
        self,
        metric: str = "eval/loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if mode not in ("min", "max"):
            raise ContractError(f"mode is {mode!r}", hint="write min or max")
        if patience < 1 or min_delta < 0:
            raise ContractError(
                f"patience is {patience} and min_delta is {min_delta}",
                hint="patience must be at least 1, min_delta at least 0",
            )
        self._metric, self._patience, self._min_delta, self._mode = metric, patience, min_delta, mode
        self._best: float | None = None
        self._best_step, self._misses = 0, 0

    def on_start(self, run: RunView) -> None:
        if not run.spec.data.eval:
            raise ContractError("EarlyStopping needs evaluations", hint="set data.eval")
        self._stop_if_due(run)

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if self._metric not in metrics:
            raise ContractError(
                f"EarlyStopping: the evaluation returned no metric {self._metric}",
                hint=f"available: {', '.join(sorted(metrics))}",
            )
        value = metrics[self._metric]
        if self._improves(value):
            self._best, self._best_step, self._misses = value, run.step, 0
        else:
            self._misses += 1
        self._stop_if_due(run)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "misses": self._misses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._best_step, self._misses = state["best"], state["best_step"], state["misses"]

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        sign = 1 if self._mode == "max" else -1
        return self._best is None or sign * (value - self._best) > self._min_delta

    def _stop_if_due(self, run: RunView) -> None:
        if self._misses < self._patience:
            return
        best = f"the best value was {self._best:.6g} at step {self._best_step}" if self._best is not None else "none"
        evaluations = f"{self._misses} evaluation{'s' * (self._misses > 1)}"
        run.request_stop(f"{self._metric} has not improved in {evaluations}; {best}")
