"""How far a run has come, in each unit of a length: when it ends, and when a record, an evaluation or a save is due.

Something is due at the first step that reaches a multiple of its length, and a run ends at the first step that reaches
`trainer.max_length`. Steps and samples are counted by the engine. Tokens and time are counted here, if the job needs
them, and are part of checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dsjob.contract.job_lengths import list_lengths
from dsjob.contract.lengths import Length
from dsjob.contract.spec import JobSpec
from dsjob.engine.engine import Engine
from dsjob.errors import ContractError, DataError
from dsjob.ranks.mesh import World

NEVER = 2**62  # steps of a run that ends by tokens or time


def require_samples(spec: JobSpec, samples: int | None) -> None:
    """Raises DataError if a length counts epochs, and the data is a stream (`samples` is None)."""
    for place, length in list_lengths(spec).items():
        if length.unit == "epochs" and samples is None:
            error = DataError(f"{length} needs a dataset with a length", hint="write it in steps, samples or time")
            error.put_at(place)
            raise error


class Passed:
    """What a run has trained so far, with all earlier runs in its folder. All ranks have the same numbers.

    tokens: of all ranks. seconds: since the first step, when the ranks have last agreed on it. tokens_before and
    seconds_before: at the end of the step before the last. samples_per_epoch: None for a stream. clock: in seconds.
    """

    def __init__(
        self, spec: JobSpec, samples_per_epoch: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        units = {length.unit for length in list_lengths(spec).values()}
        self._counts_tokens = "tokens" in units
        self.is_needed = bool(units & {"tokens", "seconds"})
        self.tokens = self.tokens_before = 0
        self.seconds = self.seconds_before = 0.0
        self._per_epoch, self._clock, self._zero = samples_per_epoch, clock, clock()

    def state_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_before": self.tokens_before,
            "seconds_before": self.seconds_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens, self.tokens_before = int(state["tokens"]), int(state["tokens_before"])
        self.seconds, self.seconds_before = float(state["seconds"]), float(state["seconds_before"])

    def start(self) -> None:
        """Training begins or continues: time passes from here on."""
        self._zero = self._clock() - self.seconds

    def read_clock(self) -> float:
        """The seconds on this rank. Ranks differ."""
        return self._clock() - self._zero

    def count_tokens(self, tokens: int, world: World) -> None:
        """Adds the tokens of a step; `tokens`: of this rank. If tokens are needed, a collective, for which the host
        waits. Raises ContractError if batches have none."""
        self.tokens_before = self.tokens
        if not self._counts_tokens:
            return
        total = float(tokens)
        if world.everyone.size > 1:
            # int64 [2]: the tokens of ranks that read data, and how many these are. Ranks that hold one model together
            # read the same tokens, which count once.
            counted = torch.tensor([tokens, 1] if world.loads else [0, 0], device=world.device)
            dist.all_reduce(counted)
            summed, readers = counted.tolist()
            total = summed * world.data_size / readers
        if not total:
            raise ContractError(
                "a length of this job counts tokens, but the batches have none",
                hint="token ids are integers of shape [samples, tokens], and the first tensor of a batch; use another"
                " unit, such as samples: 1000sp",
            )
        self.tokens += round(total)

    def end_step(self, seconds: float | None) -> None:
        """The step ended after `seconds`, as the ranks have agreed; None if they have not."""
        self.seconds_before = self.seconds
        self.seconds = seconds if seconds is not None else self.seconds

    def measure(self, length: Length, engine: Engine) -> tuple[float, float, float]:
        """The amount of a length at the beginning and at the end of the last step, and its own, all in one unit."""
        if length.unit == "tokens":
            return self.tokens_before, self.tokens, length.amount
        if length.unit == "seconds":
            return self.seconds_before, self.seconds, length.amount
        if length.unit == "steps":
            return engine.global_steps - 1, engine.global_steps, length.amount
        each = (self._per_epoch or 0) if length.unit == "epochs" else 1
        return engine.global_samples - engine.rhythm.train_batch, engine.global_samples, length.amount * each

    def ends_period(self, every: Length, engine: Engine) -> bool:
        """Whether the last step has reached another multiple of `every`."""
        if not every or not engine.global_steps:
            return False
        before, after, amount = self.measure(every, engine)
        return amount > 0 and crosses(amount, before, after)

    def reaches(self, length: Length | None, engine: Engine) -> bool:
        """Whether a run of this length is over, if its unit is tokens or time."""
        return length is not None and length.measured and self.measure(length, engine)[1] >= length.amount

    def estimate_steps(self, length: Length | None, engine: Engine) -> int:
        """How many steps a run of this length will have at its end, by the average of all steps; NEVER if unknown."""
        if length is None or not length.measured or not engine.global_steps:
            return NEVER
        done = self.measure(length, engine)[1]
        return max(engine.global_steps, math.ceil(engine.global_steps * length.amount / done)) if done else NEVER


def crosses(every: float, before: float, after: float) -> bool:
    """Whether there is a multiple of `every` in the interval (before, after]."""
    return math.floor(after / every + 1e-9) > math.floor(before / every + 1e-9)
