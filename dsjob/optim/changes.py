"""Applies changes to the optimizer's and schedule's arguments that the document has had since a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsjob.contract.spec import EngineSpec, Method
from dsjob.optim.closed_form import ClosedForm
from dsjob.optim.groups import list_overrides


def apply_changes(
    optimizer: Optimizer, scheduler: LRScheduler | None, before: EngineSpec, now: EngineSpec
) -> list[str]:
    """Replaces hyperparameters restored from a checkpoint by those changed in the document since.

    Returns descriptions of the changes. A schedule in closed form already uses the new ones; any other is scaled to the
    new learning rate.
    """
    changes: dict[str, None] = {}  # used as an ordered set
    for group in optimizer.param_groups:
        for name, value, old in _list_changes(before.optimizer, now.optimizer, group):
            changes[f"optimizer.{_place(now.optimizer, group, name)} {old} -> {value}"] = None
            if name == "lr" and scheduler is not None:
                _scale_rate(group, scheduler, value, old)
            elif name in group:
                group[name] = tuple(value) if isinstance(value, list) else value
    for name, value, old in _list_changes(before.scheduler, now.scheduler):
        changes[f"scheduler.params.{name} {old} -> {value}"] = None
        if not isinstance(scheduler, ClosedForm) and hasattr(scheduler, name):
            setattr(scheduler, name, value)
    return list(changes)


def _list_changes(
    before: Method | None, now: Method | None, group: Mapping[str, Any] | None = None
) -> list[tuple[str, Any, Any]]:
    """(name, new value, old value) of the changed arguments, optionally as they apply to a parameter group."""
    if before is None or now is None or before.label.lower() != now.label.lower():
        return []
    old, new = _list_arguments(before, group), _list_arguments(now, group)
    return [(name, value, old.get(name)) for name, value in new.items() if value != old.get(name)]


def _list_arguments(method: Method, group: Mapping[str, Any] | None) -> dict[str, Any]:
    arguments = dict(method.target.arguments if method.target else method.params)
    if group is None:
        return arguments
    if "use_muon" in group:
        rates = [arguments.pop("muon_lr", None), arguments.pop("adam_lr", None)]
        rate = rates[0] if group["use_muon"] else rates[1]
        arguments.update({} if rate is None else {"lr": rate})
    return {**arguments, **list_overrides(method.param_groups.get(group.get("name", ""), {}))}


def _place(method: Method | None, group: Mapping[str, Any], name: str) -> str:
    """The document's key for a group's value."""
    rule = group.get("name", "")
    if method is not None and name in method.param_groups.get(rule, {}):
        return f"param_groups.{rule}.{name}"
    own = "muon_lr" if group.get("use_muon") else "adam_lr"
    return f"params.{own if name == 'lr' and method is not None and own in method.params else name}"


def _scale_rate(group: dict[str, Any], scheduler: LRScheduler, value: float, old: Any) -> None:
    if isinstance(scheduler, ClosedForm) or not old:
        return
    group["initial_lr"] = value
    # Such a schedule may compute the next rate from the current one, so scale that too.
    group["lr"] *= value / old
    scheduler.base_lrs = [entry["initial_lr"] for entry in scheduler.optimizer.param_groups]
