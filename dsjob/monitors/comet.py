"""Comet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dsjob.contract.monitors import Comet
from dsjob.monitors.monitor import Event, Monitor, Series


class CometMonitor(Monitor):
    """Logs to an experiment of Comet, which a resumed run continues; with `online: false`, to an archive in the run's
    folder. Of each name, it logs at most one value in `samples_log_interval` samples."""

    def __init__(self, section: Comet) -> None:
        self._section = section
        self._logged: dict[str, int] = {}  # the samples of each name's last value
        self._experiment: Any = None

    def begin(self, series: Series) -> None:
        import comet_ml

        section = self._section
        if not series.of_job:
            self._experiment = comet_ml.start(
                api_key=section.api_key,
                project=section.project,
                workspace=section.workspace,
                experiment_key=section.experiment_key,
                mode=section.mode,
                online=section.online,
            )
            if section.experiment_name:
                self._experiment.set_name(section.experiment_name)
            return
        folder = os.environ.get("COMET_OFFLINE_DIRECTORY", os.path.join(series.run_dir, "comet"))
        # Captured output would be sent before values of environment variables are masked in it.
        options: dict[str, Any] = {"auto_output_logging": False, "auto_metric_logging": False, "log_code": False}
        options["display_summary_level"] = 0  # it lists all parameters, after what the run says at its end
        self._experiment = comet_ml.start(
            project=section.project,
            workspace=section.workspace,
            experiment_key=section.experiment_key or series.key,
            mode=section.mode,
            online=section.online,
            experiment_config=comet_ml.ExperimentConfig(offline_directory=folder, **options),
        )
        self._experiment.set_name(section.experiment_name or series.name)
        self._experiment.log_parameters(dict(series.document))

    def write_events(self, events: Sequence[Event]) -> None:
        interval = self._section.samples_log_interval
        for name, value, samples in events:
            if samples - self._logged.get(name, -interval) >= interval:
                self._logged[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def end(self, failed: bool) -> None:
        self._experiment.end()
