"""Ends a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from dsjob.callbacks.callback import Callback, RunView
from dsjob.contract.directions import Direction, falls
from dsjob.errors import ContractError


class EarlyStopping(Callback):
    """Stops training after `patience` evaluations in a row in which `metric` has not improved by more than `min_delta`.

    metric: a name that evaluations return. mode: whether a smaller (`min`) or a greater value (`max`) is better; by
    default as for `checkpoint.best.mode`, from the metric's name or its `higher_is_better`. min_delta: at least 0. A
    value that is not finite counts as no improvement. The counters are part of checkpoints, so a run that has stopped
    early stops again when it is resumed, unless `patience` was increased. Raises ContractError for invalid arguments,
    if nothing says which values are better, and if an evaluation returns no such metric.
    """

    def __init__(
        self,
        metric: str = "eval/loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if mode not in ("min", "max", None):
            raise ContractError(f"mode is {mode!r}", hint="write min or max")
        if patience < 1 or min_delta < 0:
            raise ContractError(
                f"patience is {patience} and min_delta is {min_delta}",
                hint="patience must be at least 1, min_delta at least 0",
            )
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self._mode: Direction | None = mode or ("min" if falls(metric) else None)
        self._best: float | None = None
        self._best_step, self._misses = 0, 0

    def on_start(self, run: RunView) -> None:
        if not run.spec.data.eval:
            raise ContractError("EarlyStopping needs evaluations", hint="set data.eval")
        self._mode = self._mode or run.find_direction(self._metric)
        if self._mode is None:
            raise ContractError(
                f"EarlyStopping: {self._metric} does not say whether lower or higher values are better",
                hint="set mode: max if higher is better, else mode: min",
            )
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
