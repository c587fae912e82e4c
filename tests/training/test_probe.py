"""What is looked at to plan a job, against real runs and closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from job_documents import make_job, resolve, resolve_composed
from torch import Tensor, nn

from dsjob.contract.spec import JobSpec, Target, view
from dsjob.document.compose import compose
from dsjob.errors import TargetError, UsageError
from dsjob.optim import build_optimizer, build_scheduler
from dsjob.planning.model import assume_state
from dsjob.training.probe import (
    build_on_meta,
    probe_optimizer,
    size_model,
    trace_rates,
)
from dsjob.trust.grant import Trust
from dsjob.trust.targets import call_target

RECIPES = ("quickstart", "zero3_t5", "vision_digits", "bert_mlm")


def read_recipe(name: str, *overrides: str) -> JobSpec:
    return view(JobSpec, resolve_composed(compose([f"+recipe={name}", *overrides])))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_on_meta_has_the_sizes_of_the_real_one(recipe: str) -> None:
    spec = read_recipe(recipe)
    real, meta = size_model(call_target(spec.model)), size_model(build_on_meta(spec.model))
    assert real == meta
    assert real.blocks == {"quickstart": 4, "zero3_t5": 4, "vision_digits": 0, "bert_mlm": 4}[recipe]


def test_a_factory_that_needs_real_tensors_is_told_from_a_broken_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_values.py").write_text(
        "import torch\ndef build():\n    net = torch.nn.Linear(2, 2)\n    net.weight.sum().item()\n    return net\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="meta device") as caught:
        build_on_meta(Target("needs_values.build", {}), Trust(("needs_values",)))
    assert "--params" in caught.value.hint
    with pytest.raises(TargetError):
        build_on_meta(Target("needs_values.bild", {}), Trust(("needs_values",)))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Rprop", "NAdam", "ASGD"])
def test_an_optimizers_state_is_what_it_keeps_of_a_real_layer(name: str) -> None:
    method = view(JobSpec, resolve(make_job(optimizer={"type": name, "params": {"lr": 0.01}}))).optimizer
    assert method is not None
    layer = nn.Linear(64, 32)
    optimizer = build_optimizer(method, list(layer.parameters()))
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    kept = sum(v.nbytes for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor))
    state = probe_optimizer(method)
    assert state.copies * 4 * (64 * 32 + 32) + 2 * state.per_parameter == kept


@pytest.mark.parametrize("params", [{}, {"amsgrad": True}])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_what_is_assumed_of_an_optimizer_is_what_is_seen(name: str, params: dict[str, Any]) -> None:
    given = {"lr": 0.01, **(params if name != "SGD" else {"momentum": 0.9} if params else {})}
    method = view(JobSpec, resolve(make_job(optimizer={"type": name, "params": given}))).optimizer
    assert method is not None
    assert assume_state(method) == (probe_optimizer(method), "")


SCHEDULES: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 40}},
    {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": 40}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 7}},
    {"type": "linear", "params": {"num_warmup_steps": 5, "num_training_steps": 40}},
    {"type": "inverse_sqrt", "params": {"num_warmup_steps": 5}},
    {"type": "StepLR", "params": {"step_size": 6}},
    {"type": "CosineAnnealingLR", "params": {"T_max": 40}},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["type"])
def test_rates_are_those_that_a_run_uses(schedule: dict[str, Any]) -> None:
    spec = view(JobSpec, resolve(make_job(scheduler=schedule, trainer={"micro_batch": 1, "max_steps": 40})))
    assert spec.optimizer is not None
    assert spec.scheduler is not None
    optimizer = build_optimizer(spec.optimizer, [nn.Parameter(torch.zeros(1))])
    scheduler = build_scheduler(spec.scheduler, optimizer)
    used = []
    for _ in range(40):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert trace_rates(spec, 40, points=40) == [(step, pytest.approx(rate)) for step, rate in enumerate(used)]
    few = trace_rates(spec, 40, points=4)
    assert few == [(step, pytest.approx(used[step])) for step in (0, 13, 26, 39)]


def test_rates_that_depend_on_losses_are_not_drawn() -> None:
    evaluated = {"data": {"train": {"_target_": "mine.Data"}, "eval": {"_target_": "mine.Data"}}}
    trainer = {"micro_batch": 4, "max_steps": 10, "eval_every": 5}
    job = make_job(scheduler={"type": "ReduceLROnPlateau", "params": {}}, trainer=trainer, **evaluated)
    assert trace_rates(view(JobSpec, resolve(job)), 10, points=5) == []
