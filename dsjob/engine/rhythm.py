"""When a micro step ends with an optimizer step, and what a training has counted. Arithmetic alone.

With `managed_gradient_accumulation` off, no forward pass knows whether a step follows. Stages 0 and 1 then keep
gradients on their rank until `step` reduces them; at stages 2 and 3 each backward pass reduces. Samples are counted by
backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from dsjob.contract.spec import Trainer
from dsjob.errors import NonFiniteLossError, UsageError

MAX_SKIPPED = 10  # steps in a row that are left out before that is an error, where no loss scale answers to overflows


@dataclass
class Rhythm:
    """Counts of one engine. Samples are counted over all ranks.

    Where it is not `managed`, each call of `step` ends with an optimizer step, whatever backward passes came before:
    their number counts the samples.
    """

    micro_batch: int
    accumulation: int  # micro steps in one step
    data_size: int  # data-parallel ranks
    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0  # left out since gradients were not finite; global_steps counts them too
    skipped_in_a_row: int = 0  # of these, the ones since the last step that was taken
    last_skipped: int = 0  # the step that was left out last
    done: int = 0  # micro steps of the step that is not finished
    forced: bool | None = None  # what the program says of the boundary, where it wants to
    managed: bool = True
    stepping: bool = False  # inside `step`
    passes: int = 0  # backward passes since the last step

    @classmethod
    def of(cls, trainer: Trainer, data_size: int, managed: bool = True) -> Rhythm:
        """The beginning of a training."""
        return cls(trainer.micro_batch, trainer.grad_accum, data_size, managed=managed)

    @property
    def train_batch(self) -> int:
        """Samples in one step."""
        return self.micro_batch * self.accumulation * self.data_size

    @property
    def boundary(self) -> bool:
        """Whether this micro step ends with an optimizer step."""
        if not self.managed:
            return self.stepping
        return self.done + 1 >= self.accumulation if self.forced is None else self.forced

    def require_managed(self, call: str) -> None:
        """Raises UsageError for a call that has no meaning where each call of `step` is the boundary."""
        if not self.managed:
            raise UsageError(
                f"{call} is not supported with managed_gradient_accumulation=False",
                hint="the boundary is where step() is called, and gradients are reduced there",
            )

    def count_pass(self, enter: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`enter` for the outputs of one forward pass, the first call of which counts as a backward pass."""
        counted = False

        def count(gradient: Tensor) -> Tensor:
            nonlocal counted
            self.passes += not counted
            counted = True
            return enter(gradient)

        return count

    def end_micro_step(self, *, stepped: bool, skipped: bool | None = False) -> None:
        """Counts a micro step; `stepped`: with an optimizer step at its end, taken or `skipped`.

        None: that is not known yet; `note_step` is to be called before the next step is.
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

    def note_step(self, *, skipped: bool) -> None:
        """Counts whether the last step was left out."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self.skipped_steps += 1
            self.last_skipped = self.global_steps

    def require_progress(self) -> None:
        """Raises NonFiniteLossError where MAX_SKIPPED steps in a row were left out: more of them mend nothing."""
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise NonFiniteLossError(
                f"gradients were not finite in {self.skipped_in_a_row} steps in a row, up to step {self.global_steps}:"
                " none of these was taken",
                hint="look for log(0), sqrt(0) or a division by zero in the model or loss, and for nan in the data;"
                " torch.autograd.set_detect_anomaly(True) names the operator",
            )

    def set_train_batch(self, samples: int) -> None:
        """Another train batch, by another number of micro steps. Raises UsageError where that is no whole number."""
        one = self.micro_batch * self.data_size
        if samples < one or samples % one:
            needs = f"no multiple of micro batch {self.micro_batch} x {self.data_size} ranks"
            raise UsageError(f"a train batch of {samples} is {needs}", hint=f"{max(samples // one, 1) * one}, say")
        self.accumulation = samples // one

    def counts(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
        }

    def restore(self, counts: Mapping[str, int]) -> None:
        """Continues where `counts` were taken, at the beginning of a step."""
        self.global_steps, self.global_samples = counts["global_steps"], counts["global_samples"]
        self.micro_steps = self.global_steps * (self.accumulation if self.managed else 1)
        self.skipped_steps = counts.get("skipped_steps", 0)
        self.done = self.passes = self.skipped_in_a_row = 0
