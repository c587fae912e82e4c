"""Layers divided among stages: against all ways to cut, and DeepSpeed's results."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjob.deepspeed.runtime.utils import partition_balanced, partition_uniform
from dsjob.errors import UsageError
from dsjob.pipelines.partition import balance, partition


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_no_other_cut_has_a_smaller_largest_part(weights: list[int], parts: int) -> None:
    if len(weights) < parts:
        return
    ways = [(0, *cuts, len(weights)) for cuts in combinations(range(1, len(weights)), parts - 1)]
    costs = {way: max(sum(weights[a:b]) for a, b in pairwise(way)) for way in ways}
    assert costs[tuple(balance(weights, parts))] == min(costs.values())


NAMES = ["Embedding", "Block", "Block", "Block", "Block", "Linear"]
SIZES = [400, 100, 100, 100, 100, 400]


@pytest.mark.parametrize(
    ("method", "bounds"),
    [
        ("parameters", [0, 3, 6]),
        ("best", [0, 3, 6]),
        ("uniform", [0, 3, 6]),
        ("type:block", [0, 3, 6]),
        ("type:^emb|linear", [0, 3, 6]),
        ("time", [0, 5, 6]),
    ],
)
def test_methods(method: str, bounds: list[int]) -> None:
    found = partition(method, 2, names=NAMES, parameters=SIZES, seconds=[1, 1, 1, 1, 1, 9])
    assert found == bounds


def test_mistakes() -> None:
    for method, told in (
        ("type:Conv", "no layer matches; their classes are Embedding, Block, Linear"),
        ("type:(", "missing \\)"),
        ("memory", "memory is unknown; use parameters, uniform"),
        ("time", "the model is not an nn.Sequential or dsjob.Layers; use parameters, uniform or type:REGEX"),
    ):
        with pytest.raises(UsageError) as found:
            partition(method, 2, names=NAMES, parameters=SIZES)
        assert told.replace("\\", "") in f"{found.value.message}; {found.value.hint}"
    with pytest.raises(UsageError, match="6 layers cannot be divided among 7 stages"):
        partition("uniform", 7, names=NAMES, parameters=SIZES)


def test_deepspeeds_functions() -> None:
    assert partition_balanced([1, 1, 1, 1, 0, 1], 4) == [0, 1, 2, 4, 6]
    assert partition_balanced([1, 2, 1], 4) == [0, 1, 2, 3, 3]
    assert (partition_uniform(7, 3), partition_uniform(2, 4)) == ([0, 3, 5, 7], [0, 1, 2, 2, 2])
