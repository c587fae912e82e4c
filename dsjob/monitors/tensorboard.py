"""TensorBoard: event files, as DeepSpeed writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsjob.contract.monitors import MonitorFiles
from dsjob.monitors.monitor import Event, Monitor, Series


class TensorBoardMonitor(Monitor):
    """Writes event files to `output_path/job_name`, or to the folder `tensorboard` in the run's folder."""

    rewinds = True

    def __init__(self, section: MonitorFiles) -> None:
        self._section = section
        self._writer: Any = None

    def begin(self, series: Series) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = series.choose_folder(self._section, "tensorboard")
        # Readers drop values of earlier files from `purge_step` on.
        self._writer = SummaryWriter(folder, purge_step=series.begin + 1 if series.of_job else None)

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def end(self, failed: bool) -> None:
        self._writer.close()
