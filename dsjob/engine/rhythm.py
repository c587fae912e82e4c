"""Counts steps and samples, and decides which micro steps end with an optimizer step. Only arithmetic.

With `managed_gradient_accumulation` off, a forward pass cannot know whether a step follows. Stages 0 and 1 then keep
gradients on their rank until `step` reduces them; at stages 2 and 3, each backward pass reduces. Samples are counted by
the number of backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from dsjob.contract.spec import Trainer
from dsjob.errors import NonFiniteLossError, UsageError

MAX_SKIPPED = 10  # skipped steps in a row that are an error, if there is no loss scale to lower


@dataclass
class Rhythm:
    """The counters of one engine. Samples are counted over all ranks.

    If not `managed`, each call of `step` is an optimizer step, whatever the number of backward passes before it. That
    number then counts the samples.
    """

    micro_batch: int
    accumulation: int  # micro steps per step
    data_size: int  # data-parallel ranks
    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0  # skipped because gradients were not finite; global_steps includes them
    skipped_in_a_row: int = 0  # skipped since the last step that was taken
    last_skipped: int = 0  # the number of the last skipped step
    done: int = 0  # finished micro steps of the current step
    forced: bool | None = None  # the program's own decision about the boundary; None: count micro steps
    managed: bool = True
    stepping: bool = False  # inside `step`
    passes: int = 0  # backward passes since the last step
    together: bool = False  # inside `step`, for all micro steps of a step at once

    @classmethod
    def of(cls, trainer: Trainer, data_size: int, managed: bool = True) -> Rhythm:
        """The counters at the beginning of training."""
        return cls(trainer.micro_batch, trainer.grad_accum, data_size, managed=managed)

    @property
    def train_batch(self) -> int:
        """Samples per step."""
        return self.micro_batch * self.accumulation * self.data_size

    @property
    def boundary(self) -> bool:
        """Whether this micro step ends with an optimizer step."""
        if not self.managed:
            return self.stepping
        # Not ==, since `set_train_batch` may have lowered the accumulation in the middle of a step.
        return self.done + 1 >= self.accumulation if self.forced is None else self.forced

    def require_managed(self, call: str) -> None:
        """Raises UsageError for a method that makes no sense if each call of `step` is a boundary."""
        if not self.managed:
            raise UsageError(
                f"{call} is not supported with managed_gradient_accumulation=False",
                hint="each call of step() is the boundary, and reduces gradients",
            )

    def require_whole_step(self, count: int, *, begun: bool) -> None:
        """Raises UsageError for `run_step` with `count` micro batches if that is the wrong number, or a step is already
        in progress. begun: the engine has other signs that it is."""
        self.require_managed("run_step()")
        if begun or self.done or self.passes or self.forced is not None:
            raise UsageError(
                "run_step() runs a whole optimizer step, but a step is already in progress",
                hint="call it after step() at a boundary or zero_grad(), outside no_sync, and let the engine set the "
                "boundary",
            )
        if count != self.accumulation:
            raise UsageError(
                f"run_step() got {count} micro batches, but a step has {self.accumulation}",
                hint="pass one for each micro step: engine.rhythm.accumulation",
            )

    def count_pass(self, enter: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Wraps `enter` for the outputs of one forward pass: the first call counts as a backward pass."""
        counted = False

        def count(gradient: Tensor) -> Tensor:
            nonlocal counted
            self.passes += not counted
            counted = True
            return enter(gradient)

        return count

    def end_micro_step(self, *, stepped: bool, skipped: bool | None = False) -> None:
        """Counts a micro step. stepped: it ended with an optimizer step, which was taken or `skipped`.

        skipped: None if that is not known yet; then call `note_step` before the next step.
        """
        self.micro_steps += 1
        self.done = 0 if stepped else self.done + 1
        if stepped:
            self.global_steps += 1
            passes = self.accumulation if self.managed else self.passes
            self.global_samples += self.micro_batch * passes * self.data_size
            self.passes = 0
            if skipped is not None:
                self.note_step(skipped=skipped)

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """Counts all micro steps of a step but the last, which is counted within."""
        for _ in range(self.accumulation - 1):
            self.end_micro_step(stepped=False)
        self.together = True
        try:
            yield
        finally:
            self.together = False

    def note_step(self, *, skipped: bool) -> None:
        """Records whether the last step was skipped."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self.skipped_steps += 1
            self.last_skipped = self.global_steps

    def require_progress(self) -> None:
        """Raises NonFiniteLossError after MAX_SKIPPED skipped steps in a row, because further steps would not help."""
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise NonFiniteLossError(
                f"{self.skipped_in_a_row} steps in a row were skipped, up to step {self.global_steps}: gradients were"
                " not finite",
                hint="look for log(0), sqrt(0) or a division by zero in the model or loss, and for nan in the data;"
                " torch.autograd.set_detect_anomaly(True) names the operator",
            )

    def set_train_batch(self, samples: int) -> None:
        """Changes the train batch by changing the number of micro steps. Raises UsageError if it is not a multiple."""
        one = self.micro_batch * self.data_size
        if samples < one or samples % one:
            needs = f"not a multiple of micro batch {self.micro_batch} x {self.data_size} ranks"
            raise UsageError(f"a train batch of {samples} is {needs}", hint=f"try {max(samples // one, 1) * one}")
        self.accumulation = samples // one

    def counts(self) -> dict[str, int]:
        """The counters for checkpoints."""
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
        }

    def restore(self, counts: Mapping[str, int]) -> None:
        """Restores the counters, at the beginning of a step."""
        self.global_steps, self.global_samples = counts["global_steps"], counts["global_samples"]
        # Derived rather than read: the accumulation of this run may differ from that of the run that saved.
        self.micro_steps = self.global_steps * (self.accumulation if self.managed else 1)
        self.skipped_steps = counts.get("skipped_steps", 0)
        self.done = self.passes = self.skipped_in_a_row = 0
