"""Callbacks that ask something of a run, for jobs of `small_jobs`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from dsjob.callbacks import Callback, RunView


class Asking(Callback):
    """Asks for something in a hook at a step, on the last rank alone."""

    def __init__(self, hook: str, step: int, stop: str = "", save: bool = False, evaluate: bool = False) -> None:
        self.asks, self.stop, self.save, self.evaluate = (hook, step), stop, save, evaluate
        self.folder = ""

    def on_start(self, run: RunView) -> None:
        self._ask(run, "on_start")

    def on_step(self, run: RunView) -> None:
        self._ask(run, "on_step")

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self._ask(run, "on_log")

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self._ask(run, "on_eval")

    def on_save(self, run: RunView, url: str) -> None:
        self._ask(run, "on_save")

    def on_end(self, run: RunView) -> None:
        Path(run.folder, f"ended-{run.engine.global_rank}").write_text(str(run.step))

    def _ask(self, run: RunView, hook: str) -> None:
        if (hook, run.step) != self.asks or run.engine.global_rank != run.engine.world_size - 1:
            return
        if self.stop:
            run.request_stop(self.stop)
        if self.save:
            run.request_save()
        if self.evaluate:
            run.request_evaluation()


class Touching(Callback):
    """Creates the file `stop-now` at a step. Each step takes a while, so that several ranks agree."""

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        time.sleep(0.02)
        if run.step == 3 and run.engine.global_rank == 0:
            Path(run.folder, "stop-now").touch()
