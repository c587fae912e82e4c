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

        self._run = wandb.init(
            project=self._section.project,
            group=self._section.group,
            entity=self._section.team,
            id=series.key,
            name=series.name,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", series.run_dir),
            config=dict(series.document),
            # Captured output would be sent before values of environment variables are masked in it.
            settings=wandb.Settings(console="off"),
        )

    def write_events(self, events: Sequence[Event]) -> None:
        self._run.log({name: value for name, value, _ in events}, step=events[0][2])

    def end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
