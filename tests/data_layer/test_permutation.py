"""A permutation computed index by index contains every value once, and is as random as a drawn one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjob.data.permutation import Permutation

TRIALS = 2000


def permute(length: int, seed: int) -> np.ndarray:
    return Permutation(length, seed)[np.arange(length)]


@given(length=st.integers(1, 5000), seed=st.integers(-(2**63), 2**63))
def test_every_value_comes_once(length: int, seed: int) -> None:
    assert sorted(permute(length, seed).tolist()) == list(range(length))


@given(length=st.integers(2**40, 2**62), seed=st.integers(0, 100))
def test_places_of_a_huge_range_have_different_values_within_it(length: int, seed: int) -> None:
    places = np.linspace(0, length - 1, 1000).astype(np.int64) % length
    values = Permutation(length, seed)[np.unique(places)]
    assert len(set(values.tolist())) == len(np.unique(places))
    assert values.min() >= 0
    assert values.max() < length


def test_a_value_depends_on_its_place_alone() -> None:
    permutation = Permutation(10_000, 3)
    whole = permutation[np.arange(10_000)]
    assert permutation[np.array([17, 9_999, 0])].tolist() == whole[[17, 9_999, 0]].tolist()


def test_every_order_of_four_values_is_about_equally_frequent() -> None:
    found = Counter(tuple(permute(4, seed).tolist()) for seed in range(24 * 400))
    assert len(found) == 24
    # 23 degrees of freedom: a fair choice exceeds 60 once in 30,000 times.
    assert sum((number - 400) ** 2 / 400 for number in found.values()) < 60


@pytest.mark.parametrize("length", [1000, 1009])
def test_places_and_values_are_independent(length: int) -> None:
    """Each tenth of the values comes equally often in each tenth of the places."""
    cells = np.zeros((10, 10))
    for seed in range(TRIALS):
        cells += np.histogram2d(np.arange(length), permute(length, seed), bins=10)[0]
    tenths = np.histogram(np.arange(length), bins=10)[0]
    expected = TRIALS * np.outer(tenths, tenths) / length
    # 81 degrees of freedom: mean 81, standard deviation 13.
    assert ((cells - expected) ** 2 / expected).sum() < 81 + 5 * 13


def test_neighbours_fixed_points_and_ascents_are_those_of_random_permutations() -> None:
    """The numbers of a random permutation of n values have these means: fixed points 1, pairs v, v + 1 that stay
    neighbours 1 - 1/n, ascents (n - 1) / 2, with variances of 1, 1 and (n + 1) / 12."""
    length = 1000
    drawn = [permute(length, seed) for seed in range(TRIALS)]
    fixed = [int((values == np.arange(length)).sum()) for values in drawn]
    neighbours = [int((np.diff(values) == 1).sum()) for values in drawn]
    ascents = [int((np.diff(values) > 0).sum()) for values in drawn]
    for found, mean, variance in ((fixed, 1, 1), (neighbours, 0.999, 1), (ascents, 499.5, 1001 / 12)):
        assert abs(np.mean(found) - mean) < 5 * (variance / TRIALS) ** 0.5
        assert 0.8 < np.var(found) / variance < 1.2


def test_seeds_that_follow_each_other_share_no_order() -> None:
    first, second = permute(1000, 1), permute(1000, 2)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.15
    assert (first == second).sum() < 10
