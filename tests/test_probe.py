"""What is looked at to plan a job, against real runs and closed forms."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest
import torch
from allocations import Ledger
from job_documents import make_job, resolve, resolve_composed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsjob.compose import compose
from dsjob.entry import build_engine
from dsjob.contract import call_model
from dsjob.data import TrainingLoader
from dsjob.errors import TargetError, UsageError
from dsjob.mesh import join_world
from dsjob.optim import build_optimizer, build_scheduler
from dsjob.parallel.wrap import find_blocks
from dsjob.plan.model import OptimizerState
from dsjob.plan.report import Activations
from dsjob.probe import (
    build_on_meta,
    load_data,
    measure_activations,
    probe_optimizer,
    size_model,
    trace_rates,
)
from dsjob.spec import JobSpec, Method, Target, view
from dsjob.targets import call_target

RECIPES = ("quickstart", "zero3_t5", "vision_digits")


def read_recipe(name: str, *overrides: str) -> JobSpec:
    return view(JobSpec, resolve_composed(compose([f"+recipe={name}", *overrides])))


def look(spec: JobSpec) -> Activations:
    return measure_activations(build_on_meta(spec.model), next(iter(load_data(spec, 1))), spec)


def run_forward(spec: JobSpec, *, checkpointing: bool = False) -> int:
    """Bytes that torch's allocator has given out for a real micro batch of the job, when its forward pass has ended."""
    world = join_world(device="cpu")
    model = call_target(spec.model)
    for block in find_blocks(model) if checkpointing else ():
        block.forward = Checkpointed(block.forward)  # type: ignore[method-assign, assignment]
    engine = build_engine(model, spec, world)
    batch = next(iter(load_data(spec, 1)))
    with Ledger() as ledger:
        ledger.mark("before")
        outputs = call_model(engine, batch)
        ledger.mark("after")
    assert outputs is not None
    return ledger.live("after") - ledger.live("before")


class Checkpointed:
    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_activations_are_within_20_percent_of_what_a_real_forward_pass_keeps(recipe: str, precision: str) -> None:
    spec = read_recipe(recipe, f"precision={precision}")
    found = look(spec)
    assert found.reason == ""
    assert found.whole == pytest.approx(run_forward(spec), rel=0.2)


@pytest.mark.parametrize("recipe", ["quickstart", "zero3_t5"])
def test_checkpointed_activations_are_within_20_percent_of_torchs_own(recipe: str) -> None:
    spec = read_recipe(recipe)
    found = look(spec)
    assert found.checkpointed == pytest.approx(run_forward(spec, checkpointing=True), rel=0.2)
    assert found.recomputed is not None
    assert found.whole is not None
    assert found.checkpointed + found.recomputed < found.whole
