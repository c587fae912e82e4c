"""transformers' schedules by name, step by step beside transformers' own."""

from typing import Any

import pytest
from test_schedules import make_optimizer, make_schedule
from transformers import get_scheduler

from dsjob.contract.spec import Method
from dsjob.errors import TargetError
from dsjob.optim.schedules import settle_length

CASES: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {"num_warmup_steps": 4}),
    *(
        (kind, {"num_training_steps": 17, "num_warmup_steps": warm_up, **more})
        for kind, more in [
            ("linear", {}),
            ("cosine", {}),
            ("cosine", {"num_cycles": 1.75}),
            ("cosine_with_restarts", {}),
            ("cosine_with_restarts", {"num_cycles": 3}),
            ("cosine_with_min_lr", {"min_lr": 0.05}),
            ("cosine_with_min_lr", {"min_lr_rate": 0.3, "num_cycles": 1.0}),
            ("polynomial", {}),
            ("polynomial", {"lr_end": 0.01, "power": 2.5}),
            ("inverse_sqrt", {}),
            ("inverse_sqrt", {"timescale": 3}),
            ("warmup_stable_decay", {"num_decay_steps": 6}),
            ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "1-sqrt", "warmup_type": "1-sqrt"}),
            ("warmup_stable_decay", {"num_decay_steps": 6, "num_stable_steps": 3, "min_lr_ratio": 0.2}),
            (
                "warmup_stable_decay",
                {"num_decay_steps": 6, "decay_type": "linear", "warmup_type": "cosine", "min_lr_ratio": 0.1},
            ),
            ("warmup_stable_decay", {"num_decay_steps": 8, "num_cycles": 1.5}),
        ]
        for warm_up in (0, 5)
    ),
]


def make_ours(kind: str, params: dict[str, Any], optimizer: Any) -> Any:
    given = {key: value for key, value in params.items() if (kind, key) != ("inverse_sqrt", "num_training_steps")}
    return make_schedule(kind, given, optimizer)


@pytest.mark.filterwarnings("ignore:Both num_training_steps")
@pytest.mark.parametrize(("kind", "params"), CASES, ids=str)
def test_rates_are_those_of_transformers(kind: str, params: dict[str, Any]) -> None:
    ours, theirs = make_optimizer(0.2, groups=2), make_optimizer(0.2, groups=2)
    for optimizer in (ours, theirs):
        optimizer.param_groups[1]["lr"] = 0.7
    more = {key: value for key, value in params.items() if key not in ("num_warmup_steps", "num_training_steps")}
    lengths = (params.get("num_warmup_steps"), params.get("num_training_steps"))
    reference = get_scheduler(kind, theirs, *lengths, scheduler_specific_kwargs=more)
    schedule = make_ours(kind, params, ours)
    for step in range(24):
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (ours, theirs)]
        assert rates[0] == pytest.approx(rates[1], abs=1e-12), f"step {step}"
        for optimizer, stepped in ((ours, schedule), (theirs, reference)):
            optimizer.step()
            stepped.step()


@pytest.mark.parametrize(("kind", "params"), CASES[1::6], ids=str)
def test_a_saved_schedule_goes_on_where_it_was(kind: str, params: dict[str, Any]) -> None:
    first, second = make_optimizer(0.2), make_optimizer(0.2)
    schedule, resumed = make_ours(kind, params, first), make_ours(kind, params, second)
    for _ in range(7):
        first.step()
        schedule.step()
    resumed.load_state_dict(schedule.state_dict())
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("cosine_with_min_lr", {"num_training_steps": 9}, "give either min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"num_training_steps": 9, "min_lr": 0, "min_lr_rate": 0}, "give either"),
        ("polynomial", {"num_training_steps": 9, "lr_end": 0.2}, "lr_end 0.2 is not below"),
        ("warmup_stable_decay", {"num_decay_steps": 3}, "num_training_steps or num_stable_steps"),
        ("linear", {"num_training_steps": 9, "warmup": 1}, "warmup"),
    ],
)
def test_arguments_that_do_not_fit_are_named(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        make_schedule(kind, params, make_optimizer(0.1))


@pytest.mark.parametrize(
    ("kind", "params", "key", "expected"),
    [
        ("linear", {}, "num_training_steps", 30),
        ("cosine", {"num_training_steps": "auto"}, "num_training_steps", 30),
        ("polynomial", {"num_training_steps": 9}, "num_training_steps", 9),
        ("WarmupDecayLR", {}, "total_num_steps", 30),
        ("constant", {}, "num_training_steps", None),
        ("inverse_sqrt", {}, "num_training_steps", None),
    ],
)
def test_a_schedule_is_as_long_as_the_run_unless_it_says_so(
    kind: str, params: dict[str, Any], key: str, expected: int | None
) -> None:
    assert settle_length(Method(kind, params, None), 30).params.get(key) == expected
    assert settle_length(Method(kind, params, None), None).params == params
