"""What a document says of optimizer and schedule that differs from what it said when the checkpoint was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsjob.optim.schedules import ClosedForm
from dsjob.spec import EngineSpec, Method


def apply_changes(
    optimizer: Optimizer, scheduler: LRScheduler | None, before: EngineSpec, now: EngineSpec
) -> list[str]:
    """Puts hyperparameters that were changed since a checkpoint in place of those that it brought back.

    Returns what changed, in words. A schedule in closed form has them already; any other is scaled to the new rate.
    """
    told: list[str] = []
    for name, value, old in _list_changes(before.optimizer, now.optimizer):
        told.append(f"optimizer.params.{name} {old} -> {value}")
        for group in optimizer.param_groups:
            if name == "lr" and scheduler is not None:
                _scale_rate(group, scheduler, value, old)
            elif name in group:
                group[name] = tuple(value) if isinstance(value, list) else value
    for name, value, old in _list_changes(before.scheduler, now.scheduler):
        told.append(f"scheduler.params.{name} {old} -> {value}")
        if not isinstance(scheduler, ClosedForm) and hasattr(scheduler, name):
            setattr(scheduler, name, value)
    return told


def _list_changes(before: Method | None, now: Method | None) -> list[tuple[str, Any, Any]]:
    if before is None or now is None or before.label.lower() != now.label.lower():
        return []
    old: Mapping[str, Any] = before.target.arguments if before.target else before.params
    new: Mapping[str, Any] = now.target.arguments if now.target else now.params
    return [(name, value, old.get(name)) for name, value in new.items() if value != old.get(name)]


def _scale_rate(group: dict[str, Any], scheduler: LRScheduler, value: float, old: Any) -> None:
    if isinstance(scheduler, ClosedForm) or not old:
        return
    group["initial_lr"] = value
    group["lr"] *= value / old
    scheduler.base_lrs = [entry["initial_lr"] for entry in scheduler.optimizer.param_groups]
