"""Overrides that Hydra would take minutes for are refused within a moment, and what is wrong with unreadable ones."""

from __future__ import annotations

import math

import pytest

from dsjob.cli import main
from dsjob.document.compose import compose, count_runs, take_first
from dsjob.document.overrides import (
    MAX_ITEMS,
    MAX_KEY,
    MAX_RUNS,
    explain_unreadable,
    require_few_runs,
    require_small,
)
from dsjob.errors import UsageError


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("+" + ".".join("a" * 1000) + "=1", "2,000 bytes and 1,000 parts; the limits are 250 and 100"),
        (f"+model.{'a' * MAX_KEY}=1", "the limits are 250 and 100"),
        (f"~{'é' * 130}", "261 bytes"),
        (f"+model.sizes=[{','.join('1' * 20_000)}]", "20,000 items of lists; the limit is 2,000"),
        (f"+model.sizes={{{','.join('ab:1' for _ in range(3000))}}}", "3,000 items"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_too_large_is_refused_with_the_limit(override: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        compose(["+recipe=quickstart", override])


def test_items_count_in_all_overrides_together() -> None:
    half = f"[{','.join('1' * (MAX_ITEMS // 2))}]"
    require_small([f"a={half}", f"b={half}", "c=1", "d='1,2,3'", r'e="a\",b"'])
    with pytest.raises(UsageError):
        require_small([f"a={half}", f"b={half}", "c=1,2"])


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (["a=1"], 1),
        (["a=1,2,3", "b=choice(x,y)"], 6),
        (["a=range(1,10)"], 9),
        (["a=range(0,10,3)", "b=1,2"], 8),
        (["a=range(10,0,-2)"], 5),
        (["a=range(0,1,0.1)"], 10),
        (["a=range(1,1e10)"], 10**10 - 1),
        (["a=range(1,inf)"], math.inf),
        (["a=interval(0,1)"], 1),
    ],
)
def test_the_runs_of_a_sweep_are_counted_without_listing_them(overrides: list[str], count: float) -> None:
    assert count_runs(overrides) == count


def test_a_sweep_has_as_many_runs_as_the_limit_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    require_few_runs(MAX_RUNS)
    assert main(["-m", "+recipe=quickstart", "trainer.max_steps=range(1,1e10)"]) == 2
    assert "the sweep has 9,999,999,999 runs; the limit is 10,000" in capsys.readouterr().err


def test_the_first_run_of_a_long_range_is_its_start() -> None:
    assert take_first(["a=range(1,1e10)", "b=4,5", "c=x"]) == ["a=1", "b=4", "c=x"]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("a=[1,2", "the bracket [ at character 3 is not closed"),
        ("a={b:[1,2]", "the bracket { at character 3 is not closed"),
        ("a=${b", "the bracket { at character 4 is not closed"),
        ("a=1]", "the bracket ] at character 4 closes nothing"),
        ("a=[1}", "the bracket } at character 5 closes nothing"),
        ("a=it's", "the quote at character 5 is not closed"),
        ("a=[1,,2]", "nothing comes before the comma at character 6"),
        ("a=1,", "nothing comes after the last comma"),
        ("a=x#y", "'#' (character 4) is special"),
        ("a='#'b#", "'#' (character 7) is special"),
        ("a=f(x)", "its value is neither a number, a text nor a list"),
        ("a b=3", "a space (character 2) cannot be part of a key"),
        ("+a;b=3", "';' (character 3) cannot be part of a key"),
        ("a[0=3", "a key has no brackets"),
        ("a[0]=3", "a key has no brackets"),
        ("a:b=3", "':' (character 2) cannot be part of a key"),
        ("-a=3", "a key cannot begin with -"),
        ("a:3", "there is no = in it"),
        ("+=3", "it names no key"),
        ("@b=3", "it names no key"),
        ("a.=3", "a part of the key is empty"),
    ],
)
def test_an_unreadable_override_is_quoted_with_its_fault_and_what_to_do(override: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        compose([override])
    assert caught.value.message == f"cannot read the override {override!r}: {why}"
    assert caught.value.hint


def test_an_item_of_a_list_is_set_as_the_hint_says() -> None:
    error = explain_unreadable("optimizer.params.betas[0]=0.8")
    assert error.hint == "write the number of an item like a name: optimizer.params.betas.0=value"
    composed = compose(["+recipe=quickstart", "optimizer.params.betas=[0.7,0.9]", "optimizer.params.betas.0=0.8"])
    assert composed.document["optimizer"]["params"]["betas"] == [0.8, 0.9]


def test_an_unreadable_override_keeps_its_secret() -> None:
    error = explain_unreadable("model.token=[hunter2")
    assert "hunter2" not in str(error)
    assert "the bracket [ at character 13 is not closed" in str(error)
