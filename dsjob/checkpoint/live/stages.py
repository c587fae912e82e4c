"""Merges what the stages of a pipeline have, as a checkpoint of the whole model has it, and takes it apart again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Values = Mapping[str, Any]


def merge_values(stages: Sequence[Values]) -> dict[str, Any]:
    """The plain values of all stages as those of one model. Schedules and loss scales are the same on all stages."""
    first = stages[0]
    merged = dict(first)
    merged["optimizer"] = _merge_optimizers([stage["optimizer"] for stage in stages])
    for key in ("aliases", "roles", "pretrained"):
        merged[key] = {name: value for stage in reversed(stages) for name, value in stage[key].items()}
    return merged


def _merge_optimizers(stages: Sequence[Values]) -> dict[str, Any]:
    """The states of an optimizer. Those of several models are by name."""
    first = stages[0]
    if not first:
        return {}
    if "groups" not in first:
        return {name: _merge_optimizers([stage[name] for stage in stages]) for name in first}
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for stage in stages:
        seen = Counter[str]()
        for group in stage["groups"]:
            # A stage may lack a group, so groups are matched by what they are, not by their number.
            kind = json.dumps({key: value for key, value in group.items() if key != "names"}, sort_keys=True)
            key, seen[kind] = (kind, seen[kind]), seen[kind] + 1
            merged = groups.setdefault(key, {**group, "names": []})
            merged["names"] += [name for name in group["names"] if name not in merged["names"]]
    values = {name: value for stage in stages for name, value in stage["values"].items()}
    return {**first, "groups": [group for group in groups.values() if group["names"]], "values": values}


def take_own(values: Values, own: Collection[str], elsewhere: Collection[str]) -> Values:
    """The part of an optimizer's values that is about the parameters of this stage. own, elsewhere: names of those of
    this stage and of the others. Unknown names are kept."""
    others = set(elsewhere) - set(own)
    groups = [{**group, "names": [n for n in group["names"] if n not in others]} for group in values["groups"]]
    kept = {name: value for name, value in values["values"].items() if name not in others}
    return {**values, "groups": [group for group in groups if group["names"]], "values": kept}
