"""Ends a run after some steps."""

from __future__ import annotations

from collections.abc import Mapping

from dsjob.callbacks.callback import Callback, RunView
from dsjob.errors import ContractError


class StopAfter(Callback):
    """Ends each start of a run at its first log record after `steps` steps, with an evaluation and a save.

    `trainer.max_steps`, and with it the schedule, stays as it is. Raises ContractError for less than one step.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ContractError(f"steps is {steps}", hint="write a number of at least 1")
        self._steps, self._begun = steps, 0

    def on_start(self, run: RunView) -> None:
        self._begun = run.step

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        if run.step - self._begun >= self._steps:
            run.request_stop(f"{self._steps} step{'s' * (self._steps > 1)} since the start")
