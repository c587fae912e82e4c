"""Builds learning-rate schedules: DeepSpeed's five, transformers' by name, any class of torch.optim.lr_scheduler, or a
`_target_`.

DeepSpeed's five are in closed form: the learning rate of optimizer step k (from 0) depends only on k, so a resumed
schedule only needs k. DeepSpeed counts from -1: its step k uses i = max(k - 1, 0), so the first two steps have the
initial rate. Formulas: deepspeed/runtime/lr_schedules.py, version 0.19.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from dsjob.contract.spec import Method
from dsjob.errors import TargetError
from dsjob.optim import transformers_schedules as theirs
from dsjob.optim.closed_form import ClosedForm, Rates, spread
from dsjob.trust.grant import Trust
from dsjob.trust.signatures import find_misfits
from dsjob.trust.targets import call_target, placing_target

LENGTHS = {  # the argument for a schedule's length, for those that have one
    **dict.fromkeys(("WarmupDecayLR", "WarmupCosineLR"), "total_num_steps"),
    **dict.fromkeys(theirs.WITH_LENGTH, "num_training_steps"),
}


def settle_length(method: Method, steps: int | None) -> Method:
    """Sets the schedule's length to that of the run (`steps`), if the document leaves it out or says "auto"."""
    key = LENGTHS.get(method.type or "")
    if steps is None or key is None or method.params.get(key, "auto") != "auto":
        return method
    return replace(method, params={**method.params, key: steps})


def _warm_up(i: int, steps: int, kind: str) -> float:
    """The fraction of the warm-up reached at DeepSpeed's step i < steps. `steps` is at least 2."""
    return i / steps if kind == "linear" else math.log(i + 1) / math.log(steps)


class Schedule(ClosedForm):
    """A schedule of DeepSpeed. DeepSpeed counts from -1, so its step i is step i + 1 here."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one step, or jumps to DeepSpeed's step `last_batch_iteration`."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    @property
    def last_batch_iteration(self) -> int:
        """The current step, as DeepSpeed counts."""
        return self.last_epoch - 1


class WarmupLR(Schedule):
    """Rises from warmup_min_lr to warmup_max_lr in warmup_num_steps, then stays constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_min_lr: Rates,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
        warmup_max_lr: Rates | None = None,
    ) -> None:
        self.min_lrs = spread(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = spread(optimizer, warmup_max_lr, "warmup_max_lr")
        # At least 2, as in DeepSpeed: the logarithmic warm-up divides by log(steps), which is 0 for one step.
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def rate(self, group: int, step: int) -> float:
        low, high = self.min_lrs[group], self.max_lrs[group]
        # DeepSpeed's schedules are one step behind, so the first two steps have the same rate.
        return low + (high - low) * self.share(max(step - 1, 0))

    def share(self, i: int) -> float:
        """The position between low (0) and high (1) at DeepSpeed's step i."""
        return _warm_up(i, self.warmup_num_steps, self.warmup_type) if i < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """Like WarmupLR, then falls linearly to warmup_min_lr at total_num_steps."""

    def __init__(self, optimizer: Optimizer, *, total_num_steps: int, **warm_up: Any) -> None:
        self.total = total_num_steps
        super().__init__(optimizer, **warm_up)

    def share(self, i: int) -> float:
        if i < self.warmup_num_steps:
            return super().share(i)
        return max(0.0, (self.total - i) / max(1.0, self.total - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """Each group's own rate, times a ratio that warms up, then follows half a cosine down to cos_min_ratio."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_num_steps: int,
        warmup_min_ratio: float,
        warmup_num_steps: int,
        cos_min_ratio: float,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        self.base = spread(optimizer, None, "lr")
        self.total, self.warmup_num_steps, self.warmup_type = total_num_steps, max(2, warmup_num_steps), warmup_type
        self.low, self.end = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def rate(self, group: int, step: int) -> float:
        return self.base[group] * self._ratio(step - 1)

    def get_lr_ratio(self) -> float:
        """The factor on each group's own rate at the current step."""
        return self._ratio(self.last_batch_iteration)

    def _ratio(self, i: int) -> float:
        if i < 0:
            return 0.0
        if i < self.warmup_num_steps:
            return self.low + (1 - self.low) * _warm_up(i, self.warmup_num_steps, self.warmup_type)
        # The + 1 is DeepSpeed's: the first step after the warm-up is already on the way down.
        progress = min(1.0, (i - self.warmup_num_steps + 1) / max(1, self.total - self.warmup_num_steps))
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * progress)) / 2


class LRRangeTest(Schedule):
    """Learning rates that grow steadily, to find the range in which a model learns."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        lr_range_test_min_lr: Rates,
        lr_range_test_step_size: int,
        lr_range_test_step_rate: float,
        lr_range_test_staircase: bool,
        last_batch_iteration: int,
    ) -> None:
        self.min_lrs = spread(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.size, self.growth, self.stairs = lr_range_test_step_size, lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rate(self, group: int, step: int) -> float:
        interval = step // self.size if self.stairs else step / self.size
        return self.min_lrs[group] * (1 + self.growth * interval)


class OneCycle(Schedule):
    """One cycle of the learning rate up and down, then decay. The first beta moves in the opposite direction.

    As in DeepSpeed, the second beta becomes 0.99 if momentum is cycled. Optimizers without betas are left alone.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float,
        cycle_first_step_size: int,
        decay_step_size: int,
        cycle_momentum: bool,
        cycle_min_mom: Rates,
        cycle_max_mom: Rates,
        decay_mom_rate: float,
        last_batch_iteration: int,
        cycle_first_stair_count: int = 0,
        cycle_second_step_size: int | None = None,
        cycle_second_stair_count: int | None = None,
    ) -> None:
        self.min_lrs = spread(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = spread(optimizer, cycle_max_lr, "cycle_max_lr")
        self.up = cycle_first_step_size
        self.down = self.up if cycle_second_step_size is None else cycle_second_step_size
        self.total = self.up + self.down
        self.step_ratio = self.up / self.total  # the fraction of the cycle in which the rate rises
        down_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, down_stairs)
        self.decay_rate, self.decay_size = decay_lr_rate, decay_step_size
        self.min_moms = spread(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = spread(optimizer, cycle_max_mom, "cycle_max_mom")
        self.momentum_decay = decay_mom_rate
        self.cycles_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        self._last_betas: list[tuple[float, float]] = []
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        if self.cycles_momentum:
            # At step 0, DeepSpeed sets the lowest momentum, although its cycle begins with the highest.
            moms = self.min_moms if self.last_epoch == 0 else [first for first, _ in self.get_mom() or ()]
            self._last_betas = [(first, 0.99) for first in moms]
            # Betas are written to the groups directly: LRScheduler only sets learning rates.
            for group, betas in zip(self.optimizer.param_groups, self._last_betas, strict=True):
                group["betas"] = betas
        return super().get_lr()

    def state_dict(self) -> dict[str, Any]:
        """See ClosedForm. Includes the betas that were set."""
        return {**super().state_dict(), "last_betas": self._last_betas}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ClosedForm. Betas are handled like learning rates."""
        groups, before, saved = self.optimizer.param_groups, self._last_betas, state_dict.get("last_betas")
        now = [group["betas"] for group in groups] if self.cycles_momentum else []
        super().load_state_dict(state_dict)
        for group, betas, *known in zip(groups, now, before, saved or before, strict=False):
            if saved and tuple(betas) not in map(tuple, known):
                group["betas"] = betas

    def rate(self, group: int, step: int) -> float:
        low, high = self.min_lrs[group], self.max_lrs[group]
        if step > self.total:
            return low / (1 + self.decay_rate * self._decays(step))
        return low + (high - low) * self._height(step)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each parameter group at the current step; None if momentum is not cycled."""
        if not self.cycles_momentum:
            return None
        return [(self.momentum(index, self.last_epoch), 0.99) for index in range(len(self.max_moms))]

    def momentum(self, group: int, step: int) -> float:
        """The first beta of parameter group `group` at `step`."""
        low, high = self.min_moms[group], self.max_moms[group]
        if step > self.total:
            return high * (1 + self.momentum_decay * self._decays(step))
        return high - (high - low) * self._height(step)

    def _decays(self, step: int) -> float:
        return (step - self.total) / self.decay_size if self.decay_size else 0.0

    def _height(self, step: int) -> float:
        """The position between low and high: 0 at the ends of the cycle, 1 at its top. Rounded down if there are
        stairs."""
        at = step % self.total
        done, size, stairs = (
            (at, self.up, self.stairs[0]) if at <= self.up else (self.total - at, self.down, self.stairs[1])
        )
        return done * stairs // size / stairs if stairs else done / size


_NAMED: dict[str, type[ClosedForm]] = {
    **{kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)},
    **theirs.NAMED,
}


def build_scheduler(method: Method, optimizer: Optimizer, trust: Trust = Trust()) -> LRScheduler:  # noqa: B008 (frozen)
    """Builds the document's schedule for `optimizer`. Raises TargetError for an unknown name or invalid arguments."""
    if method.target is not None:
        with placing_target(("scheduler",)):
            made = call_target(method.target, optimizer, trust=trust, where=("scheduler",))
            if not hasattr(made, "step") or not hasattr(made, "state_dict"):
                found = f"{method.target.path} returned {type(made).__name__}, which has no step()"
                raise TargetError(f"scheduler: {found}")
        scheduler: LRScheduler = made
        return scheduler
    name = method.type or ""
    kind: Callable[..., LRScheduler] = _NAMED.get(name) or _find(name)
    for misfit in find_misfits(f"scheduler {name}", kind, 1, method.params):
        failed = TargetError(misfit.message, hint=misfit.hint)
        failed.put_at(("scheduler", "params", *([misfit.argument] if misfit.argument else [])))
        raise failed
    try:
        return kind(optimizer, **method.params)
    except (TypeError, ValueError) as error:
        failed = TargetError(f"{name}: {error}", hint="see scheduler.params in the document")
        failed.put_at(("scheduler", "params"))
        raise failed from error


def _find(name: str) -> Callable[..., LRScheduler]:
    known = {
        key: kind
        for key, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler) and not key.startswith(("_", "LRScheduler"))
    }
    if name not in known:
        names = ", ".join([*_NAMED, *sorted(known)])
        error = TargetError(f"unknown scheduler {name!r}", hint=f"available: {names}; or use a _target_")
        error.put_at(("scheduler", "type"))
        raise error
    return known[name]
