"""Schedules against DeepSpeed's own values (reference 2.5: learning rates at step 0, 1, 2, ...)."""

from typing import Any

import pytest
import torch
from torch import nn

from dsjob.contract import schema
from dsjob.contract.spec import Method
from dsjob.errors import TargetError
from dsjob.optim import build_scheduler

GOLDEN: list[tuple[str, dict[str, Any], float, list[float]]] = [
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1},
        1.0,
        [0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
        1.0,
        [0.001, 0.001, 0.002, 0.002, 0.003, 0.003, 0.004],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "decay_lr_rate": 1,
            "decay_step_size": 2,
        },
        1.0,
        [0.1, 0.325, 0.55, 0.775, 1, 0.775, 0.55, 0.325, 0.1, 0.066667, 0.05, 0.04, 0.033333, 0.028571],
    ),
    (
        "WarmupLR",
        {"warmup_max_lr": 1, "warmup_num_steps": 4, "warmup_type": "linear"},
        1.0,
        [0, 0, 0.25, 0.5, 0.75, 1, 1],
    ),
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_num_steps": 4}, 1.0, [0, 0, 0.5, 0.792481, 1, 1, 1]),
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_num_steps": 1, "warmup_type": "linear"}, 1.0, [0, 0, 0.5, 1, 1]),
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_num_steps": 0, "warmup_type": "linear"}, 1.0, [0, 0, 0.5, 1, 1]),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, 0.4, [0, 0, 0.1, 0.2, 0.3, 0.4, 0.4]),
    (
        "WarmupDecayLR",
        {"warmup_max_lr": 1, "warmup_num_steps": 4, "total_num_steps": 10, "warmup_type": "linear"},
        1.0,
        [0, 0, 0.25, 0.5, 0.75, 1, 0.833333, 0.666667, 0.5, 0.333333, 0.166667, 0, 0],
    ),
    (
        "WarmupCosineLR",
        {
            "warmup_num_steps": 4,
            "total_num_steps": 10,
            "warmup_type": "linear",
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.01,
        },
        1.0,
        [0, 0.1, 0.325, 0.55, 0.775, 0.933683, 0.7525, 0.505, 0.2575, 0.076317, 0.01, 0.01, 0.01],
    ),
    (
        "WarmupCosineLR",
        {"warmup_num_steps": 4, "total_num_steps": 10},
        1.0,
        [0, 0, 0.5, 0.792481, 1, 0.933019, 0.750025, 0.50005, 0.250075, 0.067081, 0.0001, 0.0001],
    ),
]


def make_optimizer(lr: float, groups: int = 1) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=lr)


def make_schedule(kind: str, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    section = schema.job_schema()["properties"]["scheduler"]
    full = schema.fill_defaults(params, schema.params_schema(section, kind) or {})
    return build_scheduler(Method(type=kind, params=full, target=None), optimizer)


@pytest.mark.parametrize(("kind", "params", "lr", "expected"), GOLDEN)
def test_rates_are_deepspeeds(kind: str, params: dict[str, Any], lr: float, expected: list[float]) -> None:
    optimizer = make_optimizer(lr)
    schedule = make_schedule(kind, params, optimizer)
    for step, rate in enumerate(expected):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-6), f"step {step}"
        optimizer.step()
        schedule.step()


def test_one_cycle_moves_the_first_beta_against_the_rate() -> None:
    optimizer = make_optimizer(1.0)
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    schedule = make_schedule("OneCycle", params, optimizer)
    for expected in [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9]:
        assert optimizer.param_groups[0]["betas"] == pytest.approx((expected, 0.99))
        optimizer.step()
        schedule.step()


def test_one_cycle_may_take_stairs_and_has_momenta_by_group() -> None:
    optimizer = make_optimizer(1.0, groups=2)
    params = {"cycle_min_lr": 0, "cycle_max_lr": [1, 2], "cycle_first_step_size": 4, "cycle_second_step_size": 6}
    stairs = {"cycle_first_stair_count": 2, "cycle_second_stair_count": 3}
    schedule = make_schedule("OneCycle", {**params, **stairs, "cycle_min_mom": [0.8, 0.6]}, optimizer)
    for height in [0, 0, 0.5, 0.5, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0]:
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([height, 2 * height])
        momenta = [betas[0] for betas in schedule.get_mom()]
        assert momenta == pytest.approx([0.9 - 0.1 * height, 0.9 - 0.3 * height])
        optimizer.step()
        schedule.step()
    assert schedule.step_ratio == 0.4


@pytest.mark.parametrize(("kind", "params", "lr", "expected"), GOLDEN)
def test_a_program_may_step_to_any_step_of_deepspeeds_count(
    kind: str, params: dict[str, Any], lr: float, expected: list[float]
) -> None:
    optimizer = make_optimizer(lr)
    schedule = make_schedule(kind, params, optimizer)
    assert schedule.last_batch_iteration == -1
    for i in (4, 0, 3):
        schedule.step(i)
        assert schedule.last_batch_iteration == i
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected[min(i + 1, len(expected) - 1)], abs=1e-6)


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(1.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = make_schedule("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 10}, optimizer)
    schedule.step(1)
    assert schedule.get_lr_ratio() == pytest.approx(0.5)
    schedule.load_state_dict({"last_epoch": 4})
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 1.0


def test_a_resume_brings_back_a_rate_that_a_program_has_set_and_takes_one_that_the_document_has() -> None:
    params = {"warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    first = make_optimizer(1.0)
    schedule = make_schedule("WarmupLR", params, first)
    for _ in range(2):
        first.step()
        schedule.step()
    for rate, changed, expected in ((None, 1.0, 0.25), (None, 2.0, 0.5), (0.1, 1.0, 0.1), (0.1, 2.0, 0.1)):
        second = make_optimizer(1.0)
        resumed = make_schedule("WarmupLR", {**params, "warmup_max_lr": changed}, second)
        second.param_groups[0]["lr"] = rate or first.param_groups[0]["lr"]  # as the optimizer's state has it
        resumed.load_state_dict(schedule.state_dict())
        assert second.param_groups[0]["lr"] == pytest.approx(expected)
        second.step()
        resumed.step()
        assert second.param_groups[0]["lr"] == pytest.approx(0.5 * changed)


@pytest.mark.parametrize(("kind", "params", "lr", "expected"), GOLDEN)
@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_a_saved_schedule_goes_on_where_it_was(
    kind: str, params: dict[str, Any], lr: float, expected: list[float], stop: int
) -> None:
    first = make_optimizer(lr)
    schedule = make_schedule(kind, params, first)
    for _ in range(stop):
        first.step()
        schedule.step()
    second = make_optimizer(lr)
    resumed = make_schedule(kind, params, second)
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(4):
        assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"]
        assert first.param_groups[0]["betas"] == second.param_groups[0]["betas"]
        for optimizer, stepped in ((first, schedule), (second, resumed)):
            optimizer.step()
            stepped.step()


def test_each_group_may_have_rates_of_its_own() -> None:
    optimizer = make_optimizer(1.0, groups=2)
    params = {"warmup_min_lr": [0, 1], "warmup_max_lr": [1, 3], "warmup_num_steps": 2, "warmup_type": "linear"}
    schedule = make_schedule("WarmupLR", params, optimizer)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]


def test_a_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(TargetError, match="3 values for 2 parameter groups"):
        make_schedule("WarmupLR", {"warmup_min_lr": [0, 0, 0]}, make_optimizer(1.0, groups=2))


def test_torch_schedules_are_found_by_name() -> None:
    optimizer = make_optimizer(1.0)
    schedule = build_scheduler(Method(type="StepLR", params={"step_size": 1, "gamma": 0.5}, target=None), optimizer)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_unknown_names_and_arguments_are_named() -> None:
    with pytest.raises(TargetError, match="unknown scheduler 'WarmUpLR'") as caught:
        build_scheduler(Method(type="WarmUpLR", params={}, target=None), make_optimizer(1.0))
    assert "WarmupLR" in caught.value.hint
    with pytest.raises(TargetError, match="gama"):
        build_scheduler(Method(type="StepLR", params={"step_size": 1, "gama": 1}, target=None), make_optimizer(1.0))
