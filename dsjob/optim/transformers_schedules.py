"""transformers' schedules in closed form, by the names that its Trainer uses (`lr_scheduler_type`).

Each is a factor on the groups' own learning rates. It rises linearly from 0 in num_warmup_steps, then follows its
class. Formulas: transformers/optimization.py, version 5. As there, a learning rate in `params` is relative to the
optimizer's default rate, even if groups have others.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

from dsjob.optim.closed_form import ClosedForm, spread


class Ratio(ClosedForm):
    """`constant` and `constant_with_warmup`. Subclasses override `after`."""

    def __init__(self, optimizer: Optimizer, *, num_warmup_steps: int = 0) -> None:
        self.base, self.warm_up_steps = spread(optimizer, None, "lr"), num_warmup_steps
        super().__init__(optimizer)

    def rate(self, group: int, step: int) -> float:
        return self.base[group] * self.ratio(step)

    def ratio(self, step: int) -> float:
        """The factor on each group's own rate in `step`."""
        return step / self.warm_up_steps if step < self.warm_up_steps else self.after(step)

    def after(self, step: int) -> float:
        """The factor after the warm-up."""
        return 1.0


class Decay(Ratio):
    """`linear`: falls to 0 at num_training_steps."""

    def __init__(self, optimizer: Optimizer, *, num_training_steps: int, num_warmup_steps: int = 0) -> None:
        self.total = num_training_steps
        super().__init__(optimizer, num_warmup_steps=num_warmup_steps)

    def progress(self, step: int) -> float:
        """The position between the end of the warm-up (0) and the end of the schedule (1)."""
        return (step - self.warm_up_steps) / max(1, self.total - self.warm_up_steps)

    def after(self, step: int) -> float:
        return max(0.0, (self.total - step) / max(1, self.total - self.warm_up_steps))


class Cosine(Decay):
    """`cosine`: num_cycles waves of a cosine, by default half a wave. It continues beyond the end."""

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
    """`cosine_with_min_lr`: like `cosine`, but falls to min_lr, or to min_lr_rate times the rate."""

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
            # As in transformers: relative to the optimizer's default rate, even if groups have rates of their own.
            min_lr_rate = min_lr / optimizer.defaults["lr"]
        elif min_lr is not None or min_lr_rate is None:
            raise ValueError("give either min_lr or min_lr_rate")
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
    """`polynomial`: falls to lr_end at num_training_steps, as a power of the remaining fraction."""

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
    """`inverse_sqrt`: falls like 1 / sqrt(step / timescale). The default timescale is the warm-up, or 10,000 without
    one."""

    def __init__(self, optimizer: Optimizer, *, num_warmup_steps: int = 0, timescale: int | None = None) -> None:
        self.scale = timescale or num_warmup_steps or 10_000
        super().__init__(optimizer, num_warmup_steps=num_warmup_steps)

    def after(self, step: int) -> float:
        return math.sqrt(self.scale / (step - self.warm_up_steps + self.scale))


class WarmupStableDecay(Ratio):
    """`warmup_stable_decay`: rises from min_lr_ratio, is constant for num_stable_steps, falls in num_decay_steps.

    Without num_stable_steps, the stable phase fills num_training_steps.
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
                raise ValueError("give num_training_steps or num_stable_steps")
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
    """Falls from 1 at progress 0 to 0 at progress 1."""
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
