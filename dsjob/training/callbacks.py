"""Callbacks: what happens beside training. A base class of harmless no-ops, and the files that a run writes."""

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
    """What a callback sees of the run."""

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
        """Shows `text` under `title` to the user; on rank 0 alone."""


class Callback:
    """Override what is needed. Every hook is called on every rank, in the same order, so collectives are safe in it.

    One with methods `state_dict` and `load_state_dict` has its state in each checkpoint: a dict of JSON values and of
    tensors, 1 MiB of it at most, by rank where ranks differ; state that is none of this is told of and left out. A run
    that goes on gives it back before `on_start`, with tensors on the CPU whatever they were saved from: `copy_` them
    into your own, which stay on their device.
    """

    def on_start(self, run: RunView) -> None:
        """Training begins, or goes on after a resume."""

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        """A log record: step, epoch, loss, lr, grad_norm; samples_per_second and tokens_per_second of training alone;
        eta_seconds, which counts in what evaluations, saves and callbacks have taken so far; with fp16 loss_scale too,
        and a grad_norm that is not finite where the step was skipped; what trainer.step returned besides, and of each
        further model `<name>/lr`, `<name>/grad_norm`."""

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """An evaluation is done: `eval/loss` and the document's metrics as `eval/<name>`, or what trainer.eval_step
        returned."""

    def on_save(self, run: RunView, url: str) -> None:
        """A checkpoint is committed, with what `state_dict` gave before this call; in the background, steps ago."""

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
    """Appends every log record and evaluation to metrics.jsonl in a run's folder, one object a line; rank 0 alone.

    Each step is there once: before its first line a run sets aside those of steps that it takes anew.
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
        if self._begun_at is not None:  # not in on_start: a run that fails before it gets anywhere spoils nothing
            supersede_metrics(self._run_dir, self._begun_at)
            self._begun_at, path = None, os.path.join(self._run_dir, METRICS_NAME)
            self._file = io.TextIOWrapper(open_append(path), encoding="utf-8")  # open for the rest of the run
        if self._file is not None:
            self._file.write(json.dumps(mask_texts(drop_non_finite(record))) + "\n")
            self._file.flush()
