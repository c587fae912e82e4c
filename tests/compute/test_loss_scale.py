"""The loss scale's answers to sequences of good steps and overflows, written out by hand from DeepSpeed's rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsjob.compute.loss_scale import LossScaler
from dsjob.contract.precisions import Fp16
from dsjob.errors import LossScaleError


def make_scaler(**changes: Any) -> LossScaler:
    keys: dict[str, Any] = {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 8,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }
    return LossScaler(Fp16(**{**keys, **changes}))


def follow(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; `x` is an overflow, anything else a good step."""
    scales = []
    for step in steps:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("changes", "steps", "scales"),
    [
        pytest.param({"loss_scale_window": 3}, "....", [256, 256, 256, 512], id="first-growth-on-the-4th-good-step"),
        pytest.param({"loss_scale_window": 3}, "." * 8, [256] * 3 + [512] * 3 + [1024] * 2, id="then-every-3rd"),
        pytest.param({}, "xxxx", [256, 128, 64, 32], id="hysteresis-bears-the-first-overflow-alone"),
        pytest.param({"hysteresis": 1}, "xxx", [128, 64, 32], id="no-hysteresis"),
        pytest.param({"hysteresis": 3}, "xxxx", [256, 256, 128, 64], id="hysteresis-3"),
        pytest.param({}, "x.x.x", [256, 256, 128, 128, 64], id="good-steps-do-not-refill"),
        pytest.param({"consecutive_hysteresis": True}, "x.x.x.x.", [256] * 8, id="good-steps-refill-when-consecutive"),
        pytest.param({"consecutive_hysteresis": True}, "xx.xx", [256, 128, 128, 128, 64], id="consecutive-overflows"),
        pytest.param(
            {"loss_scale_window": 2}, "xx...xx", [256, 128, 128, 128, 256, 256, 128], id="a-full-window-refills"
        ),
        pytest.param({"loss_scale_window": 2}, ".x..x...", [256] * 4 + [128] * 3 + [256], id="an-overflow-restarts"),
        # DeepSpeed's test_dynamic_loss_scale: no, all and some overflows, window 2
        pytest.param(
            {"loss_scale_window": 2},
            "." * 10,
            [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096],
            id="no-overflow",
        ),
        pytest.param({"hysteresis": 1, "initial_scale_power": 4}, "xxxx", [8, 4, 2, 1], id="all-overflow"),
        pytest.param({"hysteresis": 1, "min_loss_scale": 2, "initial_scale_power": 2}, "x", [2], id="down-to-minimum"),
        pytest.param({"hysteresis": 1, "min_loss_scale": 3, "initial_scale_power": 2}, "x", [3], id="not-below-it"),
        pytest.param(
            {"hysteresis": 1, "loss_scale_window": 2}, "xx...x", [128, 64, 64, 64, 128, 64], id="some-overflow"
        ),
        pytest.param({"loss_scale": 128}, "xx" + "." * 2000, [128] * 2002, id="static"),
    ],
)
def test_the_scale_follows_deepspeeds_rules(changes: dict[str, Any], steps: str, scales: list[float]) -> None:
    scaler = make_scaler(**changes)
    assert follow(scaler, steps) == scales


def test_an_overflow_at_the_minimum_is_an_error_that_names_what_overflowed() -> None:
    scaler = make_scaler(initial_scale_power=1, hysteresis=1)
    assert follow(scaler, "x") == [1]
    assert scaler.exhausted
    names = [f"blocks.{number}.weight" for number in range(7)]
    with pytest.raises(LossScaleError, match=r"smallest loss scale, 1, in blocks.0.weight, .* and 2 more") as caught:
        scaler.update(True, names)
    assert "bf16.enabled=true" in caught.value.hint


def test_hysteresis_is_used_up_before_the_minimum_is_an_error() -> None:
    scaler = make_scaler(initial_scale_power=0)
    assert not scaler.exhausted
    assert follow(scaler, "x") == [1]
    with pytest.raises(LossScaleError):
        scaler.update(True)


@pytest.mark.parametrize("cut", range(12))
def test_a_scale_that_is_saved_anywhere_goes_on_as_if_it_had_not_been(cut: int) -> None:
    steps, changes = "x...x.xx.....x", {"loss_scale_window": 2, "hysteresis": 3}
    whole = follow(make_scaler(**changes), steps)
    first, second = make_scaler(**changes), make_scaler(**changes)
    before = follow(first, steps[:cut])
    second.load(json.loads(json.dumps(first.state())))
    assert before + follow(second, steps[cut:]) == whole


def test_a_static_scale_is_the_documents_whatever_was_saved() -> None:
    dynamic, static = make_scaler(), make_scaler(loss_scale=64)
    follow(dynamic, "xx")
    static.load(dynamic.state())
    assert static.scale == 64
    dynamic.load(make_scaler(loss_scale=64).state())
    assert dynamic.scale == 128


def test_a_state_has_every_key_that_earlier_programs_read() -> None:
    first, second = make_scaler(), make_scaler()
    follow(first, "x.x")
    second.load(first.state())
    follow(second, "x")
    keys = {"scale", "dynamic", "skipped", "step", "last_overflow", "borne"}
    assert (second.state().keys(), second.state()["skipped"]) == (keys, 3)
    second.load({key: value for key, value in first.state().items() if key != "skipped"})  # some were saved without it
