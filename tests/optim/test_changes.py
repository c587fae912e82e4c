"""Hyperparameters that the document changes between a checkpoint and the run that goes on from it."""

from typing import Any

import torch
from job_documents import make_job, resolve
from torch import nn

from dsjob.contract.spec import JobSpec, view
from dsjob.optim import build_optimizer
from dsjob.optim.changes import apply_changes


def change(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """What is told, and the groups of an optimizer of the document before, after the change."""
    old, new = (view(JobSpec, resolve(make_job(optimizer=section))) for section in (before, now))
    weights = {"fc.weight": nn.Parameter(torch.ones(2, 2)), "fc.bias": nn.Parameter(torch.ones(2))}
    assert old.optimizer is not None
    names = {id(weight): name for name, weight in weights.items()}
    optimizer = build_optimizer(old.optimizer, weights.values(), names=names)
    return apply_changes(optimizer, None, old, new), optimizer.param_groups


def adam(decay: float, **rules: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": decay}}
    return {**section, "param_groups": rules} if rules else section


def test_a_value_that_a_rule_sets_is_left_alone() -> None:
    rule = {"match": "*bias", "weight_decay": 0}
    told, groups = change(adam(0.1, biases=rule), adam(0.2, biases=rule))
    assert told == ["optimizer.params.weight_decay 0.1 -> 0.2"]
    assert [group["weight_decay"] for group in groups] == [0.2, 0]


def test_a_rules_own_value_changes_for_its_group_alone() -> None:
    first, second = ({"match": "*bias", "weight_decay": decay, "lr": 1.0} for decay in (0, 0.5))
    told, groups = change(adam(0.1, biases=first), adam(0.1, biases=second))
    assert told == ["optimizer.param_groups.biases.weight_decay 0 -> 0.5"]
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.1, 0.1), (0.5, 1.0)]


def test_each_half_of_muon_has_its_own_rate() -> None:
    muon = {"type": "Muon", "params": {"lr": 0.1, "muon_lr": 0.2}}
    told, groups = change(muon, {"type": "Muon", "params": {"lr": 0.3, "muon_lr": 0.4}})
    assert told == ["optimizer.params.muon_lr 0.2 -> 0.4", "optimizer.params.lr 0.1 -> 0.3"]
    assert [(group["use_muon"], group["lr"]) for group in groups] == [(True, 0.4), (False, 0.3)]
