"""A training run: what takes part in it, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.joint import Savable
from dsjob.checkpoint.live.objects import Kept
from dsjob.contract.spec import JobSpec
from dsjob.data import NoLoader, TrainingLoader
from dsjob.data.given import GivenLoader
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.training.averaging import Averaging
from dsjob.training.callbacks import Callback
from dsjob.training.evaluation import Evaluator
from dsjob.training.metrics import Measures
from dsjob.training.occasions import Occasions
from dsjob.training.steps import MicroStep


@dataclass
class Progress:
    """How far a run is: what it has measured and saved so far. The engines count its steps and samples."""

    last_record: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1  # the step of the last evaluation
    rated: list[dict[str, Any]] = field(default_factory=list)  # checkpoints by their metrics, where the best stay
    behind: str = ""  # the tag of the save in the background
    last_saved: str | None = None  # the last committed checkpoint's folder
    unsaved: str = ""  # why the last save failed, until one succeeds


@dataclass(frozen=True)
class Run:
    """One training run: what takes part. Only `progress` says how far it is."""

    spec: JobSpec
    engines: Engines
    loader: TrainingLoader | GivenLoader | NoLoader
    max_steps: int
    checkpointer: Checkpointer
    callbacks: Sequence[Callback]
    say: Callable[[str, str], None]
    micro_step: MicroStep
    averaging: Averaging = field(default_factory=Averaging)
    measures: Measures = field(default_factory=Measures)  # metrics of training
    evaluator: Evaluator | None = None  # None without data.eval
    kept: Kept = field(default_factory=Kept)  # callbacks and metrics: checkpoints hold the state of those that have one
    occasions: Occasions | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def engine(self) -> Engine:
        """The engine that counts steps and samples."""
        return self.engines.first

    @property
    def savable(self) -> Savable:
        """What checkpoints hold: the one engine by itself, or all by name."""
        return self.engines if self.spec.models else self.engine

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self.engine.global_steps

    def tell(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)
