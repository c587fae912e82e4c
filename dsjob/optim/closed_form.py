"""The base of schedules in closed form, whose learning rates depend only on the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rates = float | Sequence[float]


class ClosedForm(LRScheduler):
    """A schedule whose learning rates depend only on the step. `last_batch_iteration`: its first step minus one."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        if last_batch_iteration >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each parameter group at the current step."""
        return [self.rate(index, self.last_epoch) for index in range(len(self.optimizer.param_groups))]

    def rate(self, group: int, step: int) -> float:
        """The learning rate of parameter group `group` in optimizer step `step`, counting from 0."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The step, and the learning rates set at that step. Everything else comes from the document."""
        return {"last_epoch": self.last_epoch, "last_lr": [float(rate) for rate in self._last_lr]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the saved step.

        Learning rates follow the document, except for groups whose rate other code has set since this schedule's last
        step.
        """
        # A rate that equals neither the one before this load nor the saved one was set by other code.
        before, saved = self._last_lr, state_dict.get("last_lr")
        self.count_from(state_dict)
        self._last_lr = self.get_lr()
        for index, (group, rate) in enumerate(zip(self.optimizer.param_groups, self._last_lr, strict=True)):
            if saved is not None and group["lr"] not in (before[index], *saved[index : index + 1]):
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # in place, because compiled optimizers refer to this tensor
            else:
                group["lr"] = rate

    def count_from(self, state_dict: Mapping[str, Any]) -> None:
        """Continues counting at the saved step. Groups keep their learning rates (and betas) until the next step."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1


def spread(optimizer: Optimizer, value: Rates | None, name: str) -> list[float]:
    """One value per parameter group. None means the groups' own learning rates."""
    groups = optimizer.param_groups
    if value is None:
        return [float(group.get("initial_lr", group["lr"])) for group in groups]
    if isinstance(value, (int, float)):
        return [float(value)] * len(groups)
    if len(value) != len(groups):
        raise ValueError(f"{name} has {len(value)} values for {len(groups)} parameter groups")
    return [float(item) for item in value]
