"""Callbacks: a base class whose hooks do nothing, and the files that a run writes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import IO, Any, Protocol

from dsjob.contract.environment import mask_texts
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.files import open_append, require_own
from dsjob.run_folder import (
    METRICS_NAME,
    SUPERSEDED_METRICS_NAME,
    drop_non_finite,
    supersede_metrics,
    write_resolved,
)


class RunView(Protocol):
    """The part of a run that callbacks may use."""

    @property
    def max_steps(self) -> int:
        """The step that training ends at."""

    @property
    def engine(self) -> Engine:
        """The engine that counts steps and samples."""

    @property
    def engines(self) -> Engines:
        """All engines by name."""

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""

    def say(self, title: str, text: str) -> None:
        """Shows `text` with a `title` to the user. Prints on rank 0 only."""


class Callback:
    """Override the hooks that you need. dsjob calls every hook on every rank, in the same order, so hooks may
    communicate between ranks.

    With methods `state_dict` and `load_state_dict`, a callback's state is part of each checkpoint: a dict of JSON
    values and tensors, at most 1 MiB, saved per rank if ranks differ. State that cannot be saved is left out, with a
    message. A resumed run restores it before `on_start`. Restored tensors are on the CPU: copy them into your own with
    `copy_`.
    """

    def on_start(self, run: RunView) -> None:
        """Training begins, or continues after a resume."""

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        """A log record was written.

        It has step, epoch, loss, lr, grad_norm, samples_per_second, tokens_per_second and eta_seconds. Speeds are those
        of training alone; eta_seconds also accounts for evaluations, saves and callbacks. With fp16, it has loss_scale,
        and grad_norm is not finite if the step was skipped. It also has the other values that trainer.step returned,
        and `<name>/lr` and `<name>/grad_norm` of each further model.
        """

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """An evaluation has finished: `eval/loss` and the document's metrics as `eval/<name>`, or the values that
        trainer.eval_step returned."""

    def on_save(self, run: RunView, url: str) -> None:
        """A checkpoint was committed. It contains what `state_dict` returned when the save began; for a background
        save, that was some steps ago."""

    def on_end(self, run: RunView) -> None:
        """Training has reached its last step."""


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
