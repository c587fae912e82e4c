"""MLflow: a tracking server, a database or a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from dsjob.contract.monitors import Mlflow
from dsjob.monitors.monitor import Event, Monitor, Series, flatten

_TAG = "dsjob.key"
_LONGEST = 500  # characters of a parameter, the least that a tracking server accepts


class MlflowMonitor(Monitor):
    """Logs to a run of MLflow, which a resumed run continues. Without a tracking_uri, MLflow's own settings decide."""

    def __init__(self, section: Mlflow) -> None:
        self._section = section
        self._client: Any = None
        self._run = ""

    def begin(self, series: Series) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = self._section.tracking_uri
        if uri is not None and (uri.startswith("file:") or ":" not in uri):
            # MLflow 3 refuses folders unless this is set. The document has chosen one.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = client = MlflowClient(tracking_uri=self._section.tracking_uri)
        known = client.get_experiment_by_name(self._section.experiment)
        experiment = known.experiment_id if known else client.create_experiment(self._section.experiment)
        if found := client.search_runs([experiment], f"tags.`{_TAG}` = '{series.key}'"):
            self._run = found[0].info.run_id
            client.update_run(self._run, "RUNNING")
            return
        run = client.create_run(experiment, tags={_TAG: series.key}, run_name=self._section.run_name or series.name)
        self._run = run.info.run_id
        given = flatten(series.document).items()
        parameters = [Param(name, str(value)[:_LONGEST]) for name, value in given if value is not None]
        for begin in range(0, len(parameters), 100):  # as many as a server accepts at once
            client.log_batch(self._run, params=parameters[begin : begin + 100])

    def write_events(self, events: Sequence[Event]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, samples) for name, value, samples in events])

    def end(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
