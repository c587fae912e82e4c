"""Callbacks that write the files of a run's folder."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import IO, Any

from dsjob.callbacks.callback import Callback, RunView
from dsjob.contract.environment import mask_texts
from dsjob.files import open_append, require_own
from dsjob.run_folder import (
    METRICS_NAME,
    SUPERSEDED_METRICS_NAME,
    drop_non_finite,
    supersede_metrics,
    write_resolved,
)


class ResolvedFile(Callback):
    """Writes resolved.json into a run's folder at the first log record; rank 0 alone.

    A run that fails at once leaves the file of an earlier run.
    """

    def __init__(self, run_dir: str, document: Mapping[str, Any]) -> None:
        self._run_dir, self._document, self._written = run_dir, document, False

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        if run.engine.global_rank == 0 and not self._written:
            write_resolved(self._run_dir, self._document)
            self._written = True


class MetricsFile(Callback):
    """Appends every log record and evaluation to metrics.jsonl in a run's folder, one JSON object per line, on rank 0.

    Each step appears once: before it writes its first line, a resumed run moves the lines of steps that it repeats to
    another file.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._begun_at: int | None = None
        self._file: IO[str] | None = None

    def on_start(self, run: RunView) -> None:
        if run.engine.global_rank == 0:
            for name in (METRICS_NAME, SUPERSEDED_METRICS_NAME):
                require_own(os.path.join(self._run_dir, name))
            self._begun_at = run.step

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self._write(record)

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self._write({"step": run.step, **metrics})

    def on_end(self, run: RunView) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._begun_at is not None:  # not in on_start: a run that fails before its first record changes nothing
            supersede_metrics(self._run_dir, self._begun_at)
            self._begun_at, path = None, os.path.join(self._run_dir, METRICS_NAME)
            self._file = io.TextIOWrapper(open_append(path), encoding="utf-8")  # open for the rest of the run
        if self._file is not None:
            self._file.write(json.dumps(mask_texts(drop_non_finite(record))) + "\n")
            # So that the line survives a kill, and other programs can follow the file.
            self._file.flush()
