"""What a document says of optimizer and schedule that differs from what it said when the checkpoint was saved."""

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
    """Puts hyperparameters that were changed since a checkpoint in place of those that it brought back.

    Returns what changed, in words. A schedule in closed form has them already; any other is scaled to the new rate.
    """
    told: dict[str, None] = {}
    for group in optimizer.param_groups:
        for name, value, old in _list_changes(before.optimizer, now.optimizer, group):
            told[f"optimizer.{_place(now.optimizer, group, name)} {old} -> {value}"] = None
            if name == "lr" and scheduler is not None:
                _scale_rate(group, scheduler, value, old)
            elif name in group:
                group[name] = tuple(value) if isinstance(value, list) else value
    for name, value, old in _list_changes(before.scheduler, now.scheduler):
        told[f"scheduler.params.{name} {old} -> {value}"] = None
        if not isinstance(scheduler, ClosedForm) and hasattr(scheduler, name):
            setattr(scheduler, name, value)
    return list(told)


def _list_changes(
    before: Method | None, now: Method | None, group: Mapping[str, Any] | None = None
) -> list[tuple[str, Any, Any]]:
    """The arguments that are others now, with their values now and before: those that hold for a parameter group."""
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
    """The key of the document that a group's value comes from."""
    rule = group.get("name", "")
    if method is not None and name in method.param_groups.get(rule, {}):
        return f"param_groups.{rule}.{name}"
    own = "muon_lr" if group.get("use_muon") else "adam_lr"
    return f"params.{own if name == 'lr' and method is not None and own in method.params else name}"


def _scale_rate(group: dict[str, Any], scheduler: LRScheduler, value: float, old: Any) -> None:
    if isinstance(scheduler, ClosedForm) or not old:
        return
    group["initial_lr"] = value
    group["lr"] *= value / old
    scheduler.base_lrs = [entry["initial_lr"] for entry in scheduler.optimizer.param_groups]
