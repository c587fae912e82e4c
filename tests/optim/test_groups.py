"""Parameter groups by rules of the document."""

from typing import Any

import pytest
import torch
from torch import nn

from dsjob.contract.spec import Method, Target
from dsjob.errors import TargetError
from dsjob.optim import build_optimizer

SHAPES = {"emb.weight": (5, 3), "blocks.0.norm.weight": (3,), "blocks.0.fc.weight": (3, 3), "blocks.0.fc.bias": (3,)}


def group(rules: dict[str, Any], method: Method | None = None) -> list[tuple[str, list[str], float, float]]:
    """Each group's name, its parameters, and its weight decay and rate, of AdamW with 0.1 and 0.01."""
    weights = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    names = {id(weight): name for name, weight in weights.items()}
    target = Target("torch.optim.AdamW", {"lr": 0.01, "weight_decay": 0.1})
    built = build_optimizer(Method(None, {}, target, rules), weights.values(), names=names)
    return [
        (g.get("name", ""), [names[id(p)] for p in g["params"]], g["weight_decay"], g["lr"]) for g in built.param_groups
    ]


def test_a_rule_changes_values_for_what_it_matches_and_nothing_else() -> None:
    found = group({"no_decay": {"match": ["*bias", "*norm*"], "weight_decay": 0}})
    assert found == [
        ("", ["emb.weight", "blocks.0.fc.weight"], 0.1, 0.01),
        ("no_decay", ["blocks.0.norm.weight", "blocks.0.fc.bias"], 0, 0.01),
    ]


def test_the_first_rule_that_takes_a_parameter_keeps_it() -> None:
    rules = {"norms": {"match": "*norm*", "lr": 1.0}, "flat": {"max_ndim": 1, "weight_decay": 0}}
    assert [(name, own) for name, own, _, _ in group(rules)] == [
        ("", ["emb.weight", "blocks.0.fc.weight"]),
        ("norms", ["blocks.0.norm.weight"]),
        ("flat", ["blocks.0.fc.bias"]),
    ]
    (_, flat) = group({"flat": rules["flat"], "all": {"match": "*", "lr": 1.0}})
    assert flat[1] == ["emb.weight", "blocks.0.fc.weight"]


def test_conditions_of_a_rule_have_to_hold_together() -> None:
    found = group({"matrices": {"match": "blocks.*", "min_ndim": 2, "lr": 1.0}})
    assert found[1] == ("matrices", ["blocks.0.fc.weight"], 0.1, 1.0)


def test_a_pattern_without_a_match_is_told_with_names_near_it() -> None:
    with pytest.raises(TargetError, match=r'no_decay.match: "\*nrom\*" matches no trained parameter') as caught:
        group({"no_decay": {"match": ["*bias", "*nrom*"], "weight_decay": 0}})
    assert "blocks.0.norm.weight" in caught.value.hint.split(",")[0]


def test_a_rule_that_is_left_with_nothing_is_told() -> None:
    with pytest.raises(TargetError, match=r"param_groups\.again: selects no parameters"):
        group({"biases": {"match": "*bias", "lr": 1.0}, "again": {"match": "*fc.bias", "lr": 2.0}})


def test_a_value_that_the_optimizer_does_not_know_is_told() -> None:
    with pytest.raises(
        TargetError, match=r"param_groups\.a\.weight_decai: the optimizer has no such group option"
    ) as caught:
        group({"a": {"match": "*bias", "weight_decai": 0}})
    assert "weight_decay" in caught.value.hint


def test_groups_of_the_program_and_of_the_document_are_one_too_many() -> None:
    weight = nn.Parameter(torch.ones(2))
    method = Method("Adagrad", {"lr": 0.1}, None, {"a": {"match": "w", "lr": 1.0}})
    with pytest.raises(TargetError, match="the program already passes parameter groups"):
        build_optimizer(method, [{"params": [weight], "lr": 1.0}], names={id(weight): "w"})
    plain = build_optimizer(method, [{"params": [weight]}], names={id(weight): "w"})
    assert plain.param_groups[0]["lr"] == 1.0
