"""When a micro step ends with an optimizer step, and what a training has counted. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsjob.errors import UsageError
from dsjob.spec import Trainer


@dataclass
class Rhythm:
    """Counts of one engine. Samples are counted over all ranks."""

    micro_batch: int
    accumulation: int  # micro steps in one step
    world_size: int
    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    done: int = 0  # micro steps of the step that is not finished
    forced: bool | None = None  # what the program says of the boundary, where it wants to

    @classmethod
    def of(cls, trainer: Trainer, world_size: int) -> Rhythm:
        """The beginning of a training."""
        return cls(trainer.micro_batch, trainer.grad_accum, world_size)

    @property
    def train_batch(self) -> int:
        """Samples in one step."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def boundary(self) -> bool:
        """Whether this micro step ends with an optimizer step."""
        return self.done + 1 >= self.accumulation if self.forced is None else self.forced

    def end_micro_step(self, *, stepped: bool) -> None:
        """Counts a micro step; `stepped`: with an optimizer step, taken or skipped, at its end."""
        self.micro_steps += 1
        self.done = 0 if stepped else self.done + 1
        if stepped:
            self.global_steps += 1
            self.global_samples += self.train_batch

    def set_train_batch(self, samples: int) -> None:
        """Another train batch, by another number of micro steps. Raises UsageError where that is no whole number."""
        one = self.micro_batch * self.world_size
        if samples < one or samples % one:
            needs = f"no multiple of micro batch {self.micro_batch} x {self.world_size} ranks"
            raise UsageError(f"a train batch of {samples} is {needs}", hint=f"{max(samples // one, 1) * one}, say")
        self.accumulation = samples // one

    def counts(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps,
        }

    def restore(self, counts: Mapping[str, int]) -> None:
        """Continues where `counts` were taken, at the beginning of a step."""
        self.global_steps, self.global_samples = counts["global_steps"], counts["global_samples"]
        self.micro_steps, self.done = self.global_steps * self.accumulation, 0
