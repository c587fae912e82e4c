"""Callbacks that write the files of a run's folder."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from functools import partial
from typing import IO, Any

import torch

from dsjob.callbacks.callback import Callback, RunView
from dsjob.contract.masking import mask_texts
from dsjob.contract.resolved import ResolvedJob
from dsjob.errors import StorageError
from dsjob.files import explained, open_append, require_own
from dsjob.provenance import ENVIRONMENT_NAME, Recording, append
from dsjob.ranks.mesh import World
from dsjob.run_folder import (
    METRICS_NAME,
    SUPERSEDED_METRICS_NAME,
    Claim,
    append_given,
    drop_non_finite,
    supersede_metrics,
    write_resolved,
)


class RunFiles(Callback):
    """Writes the files of a run's folder that say what it trains, and how far it is; rank 0 alone.

    resolved.json and a line of job.jsonl are written at the first log record: a run that fails at once leaves the files
    of an earlier run. metrics.jsonl has a line of JSON for every log record and evaluation, and each step once: before
    it writes its first line, a resumed run moves the lines of steps that it repeats to another file.

    Once a newer run has begun in the folder, raises FencedError instead.
    """

    def __init__(self, run_dir: str, job: ResolvedJob) -> None:
        self._run_dir, self._job = run_dir, job
        self._claim: Claim | None = None
        self._begun_at = 0
        self._has_job = False
        self._file: IO[str] | None = None

    def on_start(self, run: RunView) -> None:
        if run.engine.global_rank == 0:
            for name in (METRICS_NAME, SUPERSEDED_METRICS_NAME):
                require_own(os.path.join(self._run_dir, name))
            self._begun_at = run.step
            self._claim = Claim(self._run_dir)

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        if self._claim is not None:
            with self._claim.writing():
                if not self._has_job:
                    write_resolved(self._run_dir, self._job.document)
                    append_given(self._run_dir, self._job.given)
                    self._has_job = True
                self._append(record)

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if self._claim is not None:
            with self._claim.writing():
                self._append({"step": run.step, **metrics})

    def on_end(self, run: RunView) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, record: Mapping[str, Any]) -> None:
        path = os.path.join(self._run_dir, METRICS_NAME)
        if self._file is None:  # not in on_start: a run that fails before its first record changes nothing
            supersede_metrics(self._run_dir, self._begun_at)
            self._file = io.TextIOWrapper(open_append(path), encoding="utf-8")  # open for the rest of the run
        with explained(path):
            self._file.write(json.dumps(mask_texts(drop_non_finite(record))) + "\n")
            # So that the line survives a kill, and other programs can follow the file.
            self._file.flush()


class EnvironmentFile(Callback):
    """Appends what this attempt runs with to environment.jsonl in a run's folder, once it has logged; rank 0 alone."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._recording: Recording | None = None

    def on_start(self, run: RunView) -> None:
        if run.engine.global_rank == 0:
            self._recording = Recording(partial(_describe_devices, run.engine.world))

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self._write(run, wait=False)

    def on_end(self, run: RunView) -> None:
        self._write(run, wait=True)

    def _write(self, run: RunView, *, wait: bool) -> None:
        record = self._recording.take(wait=wait) if self._recording else None
        if record is None:
            return
        self._recording = None
        try:
            append(self._run_dir, record)
        except (OSError, StorageError) as error:  # training does not depend on it
            run.say("not saved", f"what this run ran with ({ENVIRONMENT_NAME}): {error}")


def _describe_devices(world: World) -> dict[str, Any]:
    """The devices that this rank sees, and the versions that torch was built with."""
    cuda = torch.cuda.is_available()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if cuda else 0)]
    return {
        "ranks": world.everyone.size,
        "devices": [f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in properties] or [world.device.type],
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }
