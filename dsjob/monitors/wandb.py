"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dsjob.contract.monitors import Wandb
from dsjob.monitors.monitor import Event, Monitor, Series


class WandbMonitor(Monitor):
    """Logs to a run of Weights & Biases, which a resumed run continues. `WANDB_MODE=offline` writes files only."""

    def __init__(self, section: Wandb) -> None:
        self._section = section
        self._run: Any = None

    def begin(self, series: Series) -> None:
        import wandb

        place: dict[str, Any] = {
            "project": self._section.project,
            "group": self._section.group,
            "entity": self._section.team,
        }
        if not series.of_job:
            self._run = wandb.init(**place)  # the run that the program has begun itself, if any
            return
        self._run = wandb.init(
            **place,
            id=series.key,
            name=series.name,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", series.run_dir),
            config=dict(series.document),
            # Captured output would be sent before values of environment variables are masked in it.
            settings=wandb.Settings(console="off"),
        )

    def write_events(self, events: Sequence[Event]) -> None:
        # wandb itself joins the values of one step.
        for name, value, samples in events:
            self._run.log({name: value}, step=samples)

    def end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
