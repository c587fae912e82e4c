"""transformers' schedules by the names that its Trainer knows them by (`lr_scheduler_type`), in closed form.

Each is a ratio of the groups' own rates, up linearly from 0 within num_warmup_steps, then as the class says. Formulas:
transformers/optimization.py, version 5. As there, a rate in `params` counts against the optimizer's default rate where
groups have others.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

from dsjob.optim.closed_form import ClosedForm, spread


class Ratio(ClosedForm):
    """`constant` and `constant_with_warmup`; the others differ in `after` alone."""

    def __init__(self, optimizer: Optimizer, *, num_warmup_steps: int = 0) -> None:
        self.base, self.warm_up_steps = spread(optimizer, None, "lr"), num_warmup_steps
        super().__init__(optimizer)

    def rate(self, group: int, step: int) -> float:
        return self.base[group] * self.ratio(step)

    def ratio(self, step: int) -> float:
        """The share of its own rate that each group has in `step`."""
        return step / self.warm_up_steps if step < self.warm_up_steps else self.after(step)

    def after(self, step: int) -> float:
        """The same, after the warm-up."""
        return 1.0


class Decay(Ratio):
    """`linear`: down to 0 at num_training_steps."""

    def __init__(self, optimizer: Optimizer, *, num_training_steps: int, num_warmup_steps: int = 0) -> None:
        self.total = num_training_steps
        super().__init__(optimizer, num_warmup_steps=num_warmup_steps)

    def progress(self, step: int) -> float:
        """The share of the way from the end of the warm-up to the end of the schedule."""
        return (step - self.warm_up_steps) / max(1, self.total - self.warm_up_steps)

    def after(self, step: int) -> float:
        return max(0.0, (self.total - step) / max(1, self.total - self.warm_up_steps))


class Cosine(Decay):
    """`cosine`: num_cycles waves of a cosine, half a wave by default, which goes on beyond the end."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        num_cycles: float = 0.5,
        floor: float = 0.0,
    ) -> None:
        self.cycles, self.floor = num_cycles, floor
        super().__init__(optimizer, num_training_steps=num_training_steps, num_warmup_steps=num_warmup_steps)

    def after(self, step: int) -> float:
        height = (1 + math.cos(2 * math.pi * self.cycles * self.progress(step))) / 2
        return max(0.0, self.floor + (1 - self.floor) * height)


class CosineWithMinLR(Cosine):
    """`cosine_with_min_lr`: as `cosine`, down to min_lr, or to min_lr_rate as a share of the rate."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        num_cycles: float = 0.5,
        min_lr: float | None = None,
        min_lr_rate: float | None = None,
    ) -> None:
        if min_lr is not None and min_lr_rate is None:
            min_lr_rate = min_lr / optimizer.defaults["lr"]
        elif min_lr is not None or min_lr_rate is None:
            raise ValueError("one of min_lr and min_lr_rate is needed, and not both")
        super().__init__(
            optimizer,
            num_training_steps=num_training_steps,
            num_warmup_steps=num_warmup_steps,
            num_cycles=num_cycles,
            floor=min_lr_rate,
        )


class CosineWithRestarts(Decay):
    """`cosine_with_restarts`: num_cycles half waves, each from the full rate down to 0."""

    def __init__(
        self, optimizer: Optimizer, *, num_training_steps: int, num_warmup_steps: int = 0, num_cycles: int = 1
    ) -> None:
        self.cycles = num_cycles
        super().__init__(optimizer, num_training_steps=num_training_steps, num_warmup_steps=num_warmup_steps)

    def after(self, step: int) -> float:
        progress = self.progress(step)
        return 0.0 if progress >= 1 else (1 + math.cos(math.pi * (self.cycles * progress % 1))) / 2


class Polynomial(Decay):
    """`polynomial`: down to lr_end at num_training_steps, as a power of what is left of the way."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        lr_end: float = 1e-7,
        power: float = 1.0,
    ) -> None:
        self.end, self.power = lr_end / optimizer.defaults["lr"], power
        if self.end >= 1:
            raise ValueError(f"lr_end {lr_end:g} is not below the optimizer's lr {optimizer.defaults['lr']:g}")
        super().__init__(optimizer, num_training_steps=num_training_steps, num_warmup_steps=num_warmup_steps)

    def after(self, step: int) -> float:
        left = max(0.0, 1 - self.progress(step))
        return float(self.end + (1 - self.end) * left**self.power)


class InverseSqrt(Ratio):
    """`inverse_sqrt`: as one over the root of the step, in units of `timescale` (the warm-up, or 10,000 without)."""

    def __init__(self, optimizer: Optimizer, *, num_warmup_steps: int = 0, timescale: int | None = None) -> None:
        self.scale = timescale or num_warmup_steps or 10_000
        super().__init__(optimizer, num_warmup_steps=num_warmup_steps)

    def after(self, step: int) -> float:
        return math.sqrt(self.scale / (step - self.warm_up_steps + self.scale))


class WarmupStableDecay(Ratio):
    """`warmup_stable_decay`: up from min_lr_ratio, constant for num_stable_steps, down to it in num_decay_steps.

    Where num_stable_steps is absent, it is what num_training_steps leaves.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        num_decay_steps: int,
        num_warmup_steps: int = 0,
        num_training_steps: int | None = None,
        num_stable_steps: int | None = None,
        warmup_type: str = "linear",
        decay_type: str = "cosine",
        min_lr_ratio: float = 0.0,
        num_cycles: float = 0.5,
    ) -> None:
        if num_stable_steps is None:
            if num_training_steps is None:
                raise ValueError("one of num_training_steps and num_stable_steps is needed")
            num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
        self.decay_at, self.decay_steps = num_warmup_steps + num_stable_steps, num_decay_steps
        self.up, self.down, self.low, self.cycles = warmup_type, decay_type, min_lr_ratio, num_cycles
        super().__init__(optimizer, num_warmup_steps=num_warmup_steps)

    def ratio(self, step: int) -> float:
        if step < self.warm_up_steps:
            return self._above(_fall(1 - step / self.warm_up_steps, self.up, 0.5))
        if step < self.decay_at:
            return 1.0
        if step < self.decay_at + self.decay_steps:
            return self._above(_fall((step - self.decay_at) / self.decay_steps, self.down, self.cycles))
        return self.low

    def _above(self, height: float) -> float:
        return max(0.0, self.low + (1 - self.low) * height)


def _fall(progress: float, kind: str, cycles: float) -> float:
    """From 1 at the beginning to 0 at the end."""
    if kind == "cosine":
        return (1 + math.cos(2 * math.pi * cycles * progress)) / 2
    return 1 - (math.sqrt(progress) if kind == "1-sqrt" else progress)


NAMED: dict[str, type[ClosedForm]] = {
    "constant": Ratio,
    "constant_with_warmup": Ratio,
    "linear": Decay,
    "cosine": Cosine,
    "cosine_with_min_lr": CosineWithMinLR,
    "cosine_with_restarts": CosineWithRestarts,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseSqrt,
    "warmup_stable_decay": WarmupStableDecay,
}
WITH_LENGTH = [name for name, kind in NAMED.items() if issubclass(kind, (Decay, WarmupStableDecay))]
