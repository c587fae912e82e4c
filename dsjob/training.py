"""A training run as the loop and what belongs to it see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsjob.callbacks import Callback
from dsjob.checkpoint.checkpointer import Checkpointer
from dsjob.checkpoint.joint import Savable
from dsjob.checkpoint.objects import Kept
from dsjob.contract import LossFunction
from dsjob.data import NoLoader, TrainingLoader
from dsjob.engine import Engine
from dsjob.engines import Engines
from dsjob.occasions import Occasions
from dsjob.spec import JobSpec
from dsjob.steps import MicroStep, UserStep

Metric = Callable[[Any, Any], Any]


@dataclass
class Run:
    """One training run: what takes part, and how far it is."""

    spec: JobSpec
    engines: Engines
    loader: TrainingLoader | NoLoader
    max_steps: int
    checkpointer: Checkpointer
    callbacks: Sequence[Callback]
    say: Callable[[str, str], None]
    micro_step: MicroStep
    loss: LossFunction | None = None
    evaluation: Any = None
    eval_step: UserStep | None = None
    collate: Callable[[list[Any]], Any] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept)  # callbacks and metrics: checkpoints hold the state of those that have one
    occasions: Occasions | None = None
    rated: list[dict[str, Any]] = field(default_factory=list)  # checkpoints by their metrics, where the best stay
    last_record: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    behind: str = ""  # the tag of the save in the background
    last_saved: str | None = None

    @property
    def engine(self) -> Engine:
        """The engine that counts steps and samples."""
        return self.engines.first

    @property
    def savable(self) -> Savable:
        """What checkpoints hold: the one engine by itself, or all by name."""
        return self.engines if self.spec.models else self.engine

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on; `evaluation` is None also where this rank reads no data."""
        return self.spec.data.eval is not None

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self.engine.global_steps

    def tell(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)
