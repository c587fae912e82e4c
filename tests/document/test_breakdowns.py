"""DeepSpeed's keys for breakdowns of time, memory and operations become callbacks of a job."""

from __future__ import annotations

from typing import Any

import pytest
from job_documents import make_job, resolve

from dsjob.contract.check import check_config, check_job

CLOCK = {"_target_": "dsjob.callbacks.WallClock"}
FLOPS = {"_target_": "dsjob.callbacks.Flops", "step": 2}


@pytest.mark.parametrize(
    ("config", "callbacks"),
    [
        ({"wall_clock_breakdown": True}, {"wall_clock_breakdown": CLOCK}),
        ({"wall_clock_breakdown": False, "flops_profiler": {"enabled": False}}, {}),
        ({"memory_breakdown": True}, {"memory_breakdown": {"_target_": "dsjob.callbacks.MemoryUse"}}),
        (
            {"flops_profiler": {"enabled": True, "profile_step": 4, "module_depth": 2}},
            {"wall_clock_breakdown": CLOCK, "flops_profiler": {**FLOPS, "step": 5, "depth": 2}},
        ),
        (
            {"flops_profiler": {"enabled": True, "detailed": False}},
            {"wall_clock_breakdown": CLOCK, "flops_profiler": FLOPS},
        ),
    ],
)
def test_keys_become_callbacks(config: dict[str, Any], callbacks: dict[str, Any]) -> None:
    job = make_job(deepspeed=config)
    assert [problem for problem in check_job(job) if problem.rule == "no-effect"] == []
    assert resolve(job)["callbacks"] == callbacks


def test_the_jobs_own_callback_counts() -> None:
    job = make_job(deepspeed={"wall_clock_breakdown": True}, callbacks={"mine": CLOCK})
    assert resolve(job)["callbacks"] == {"mine": CLOCK}


def test_a_program_has_breakdowns_too() -> None:
    config = {"train_batch_size": 8, "wall_clock_breakdown": True, "flops_profiler": {"enabled": True}}
    assert check_config(config) == []
