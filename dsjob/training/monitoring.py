"""Passes log records and evaluations to the monitors of a run, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from dsjob.callbacks.callback import Callback, RunView
from dsjob.checkpoint.live.rng import keep_rng
from dsjob.monitors.delivery import Delivery, name_values


class MonitorValues(Callback):
    """Sends all values of log records and evaluations. On ranks other than 0, it has no monitors."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery, self._begun = delivery, False

    def on_start(self, run: RunView) -> None:
        self._delivery.start(run.engine.global_samples)

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self._send(run, name_values(record))

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self._send(run, metrics)

    def _send(self, run: RunView, values: Mapping[str, float]) -> None:
        # Some services draw random numbers when they begin, which must not change those of training.
        with nullcontext() if self._begun else keep_rng(run.engine.device):
            self._delivery.send(values, run.engine.global_samples)
        self._begun = True
