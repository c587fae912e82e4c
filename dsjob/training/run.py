"""A training run: its parts, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dsjob.callbacks.callback import Callback
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.joint import Savable
from dsjob.checkpoint.live.objects import Kept
from dsjob.contract.directions import Direction
from dsjob.contract.spec import JobSpec
from dsjob.data import Loader
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.errors import ContractError, UsageError
from dsjob.training.averaging import Averaging
from dsjob.training.directions import find_direction
from dsjob.training.evaluation import Evaluator
from dsjob.training.metrics import Measures
from dsjob.training.occasions import Occasions
from dsjob.training.passed import Passed
from dsjob.training.pipelines import PipelinedStep
from dsjob.training.requests import Requests
from dsjob.training.steps import MicroStep
from dsjob.training.trainer import Parts


@dataclass
class Progress:
    """The mutable state of a run: what it has measured and saved so far. The engines count steps and samples."""

    last_record: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1  # the step of the last evaluation
    buffers_changed: bool = False  # by the last evaluation
    evaluates_first: bool = False  # an evaluation has outdated the checkpoint that was saved before it
    rated: list[dict[str, Any]] = field(default_factory=list)  # checkpoints and their metrics, for `checkpoint.best`
    behind: str = ""  # the tag of the save that is running in the background
    last_saved: str | None = None  # the last committed checkpoint's folder
    unsaved: str = ""  # why the last save failed, until one succeeds


@dataclass(frozen=True)
class Result:
    """The outcome of a run, or of tasks that run alone."""

    step: int  # the last step; of tasks alone, that of the weights
    epochs: float | None  # passes over the data; None for a stream
    metrics: dict[str, float]  # of the last log record, the evaluation of the weights and the task eval
    checkpoint: str | None  # the folder of the last checkpoint, or of the one that was loaded, as by load_best_at_end
    pretrained: bool  # whether it contains a single model of transformers, so that it can be converted to its format
    predictions: list[str]  # the files of the task predict
    stopped: str = ""  # why a callback or the file `stop-now` ended the run; empty after the last step
    best_step: int | None = None  # the step of the best checkpoint, if `checkpoint` and `metrics` are its own


@dataclass
class Run:
    """All parts of a training run. Only `progress`, the engines and stateful parts change while it trains; and
    `max_steps`, once tokens or time have ended it."""

    spec: JobSpec
    engines: Engines
    loader: Loader
    max_steps: int  # NEVER if only tokens or time end the run
    passed: Passed
    parts: Parts  # the methods that the loop calls
    checkpointer: Checkpointer
    callbacks: Sequence[Callback]
    say: Callable[[str, str], None]
    micro_step: MicroStep
    averaging: Averaging = field(default_factory=Averaging)
    measures: Measures = field(default_factory=Measures)  # metrics of training
    evaluator: Evaluator | None = None  # None without data.eval
    pipelined: PipelinedStep | None = None  # takes all micro batches of a step, in place of micro_step
    kept: Kept = field(default_factory=Kept)  # callbacks, metrics and data whose state checkpoints contain
    occasions: Occasions | None = None
    requests: Requests = field(default_factory=Requests)
    folder: str = ""
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.parts.attach(self)

    @property
    def engine(self) -> Engine:
        """The engine that counts steps and samples."""
        return self.engines.first

    @property
    def savable(self) -> Savable:
        """The content of checkpoints: the only engine, or all engines by name if the document has `models`."""
        return self.engines if self.spec.models else self.engine

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self.engine.global_steps

    @property
    def expected_steps(self) -> int:
        """See `RunView`."""
        return min(self.max_steps, self.passed.estimate_steps(self.spec.trainer.max_length, self.engine))

    def end_at_length(self) -> None:
        """Makes this step the last one if `trainer.max_length` counts tokens or time, and is reached."""
        if self.passed.reaches(self.spec.trainer.max_length, self.engine):
            self.max_steps = self.step

    def find_direction(self, metric: str) -> Direction | None:
        """See `RunView`."""
        return find_direction(metric, self.spec, self.kept.list_of("metrics"))

    def request_stop(self, reason: str) -> None:
        """See `RunView`."""
        self.requests.stops = self.requests.stops or reason

    def request_save(self) -> None:
        """See `RunView`."""
        self.requests.saves = True

    def request_evaluation(self) -> None:
        """See `RunView`."""
        if self.evaluator is None:
            raise UsageError("a callback has requested an evaluation, but the job has no data.eval")
        self.requests.evaluates = True

    def ask(self, record: Mapping[str, float]) -> dict[str, float]:
        """The values that callbacks add to a log record. Raises ContractError for a name that it already has."""
        added: dict[str, float] = {}
        for callback in self.callbacks:
            values = callback.on_record(self, record) or {}
            if taken := values.keys() & {*record, *added}:
                raise ContractError(
                    f"{type(callback).__name__}.on_record returned {min(taken)!r}, which the log record already has",
                    hint="return other names",
                )
            added |= values
        return added

    def tell_error(self, error: BaseException) -> None:
        """Calls on_error of every callback."""
        for callback in self.callbacks:
            with suppress(Exception):
                callback.on_error(self, error)

    def tell(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)
