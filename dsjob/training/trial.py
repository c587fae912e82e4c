"""Calls a job's model and losses with one batch, to find mistakes in `inputs`, `outputs`, `targets` and the losses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.contract.paths import Path
from dsjob.contract.spec import JobSpec
from dsjob.errors import DsjobError, Problem, UsageError, name_target
from dsjob.torch_private import FakeTensorMode, tree_map_only
from dsjob.training.build import build_model
from dsjob.training.objective import Objective, build_objective
from dsjob.training.probe import build_on_meta, load_data
from dsjob.trust.frames import describe_failure, find_path, put_at
from dsjob.trust.grant import Trust

MOST = 250_000_000  # parameters of a model that is built to be tried; a larger one is tried on fake tensors
_MODEL: Path = ("model", "_target_")


def is_worth_trying(spec: JobSpec) -> bool:
    """Whether the document says how its model is called or what its loss is, and dsjob makes these calls itself."""
    says = (spec.inputs, spec.targets, spec.outputs, spec.losses, spec.label_smoothing)
    return (
        any(says)
        and spec.data.train is not None
        and spec.model is not None
        and spec.trainer.step is None
        and spec.trainer.mpu is None
    )


def try_on_batch(spec: JobSpec, ranks: int, trust: Trust) -> list[Problem]:
    """The problems that one micro batch of the training data shows. ranks: the number of data-parallel ranks.

    Reads data and builds the model on the CPU. A model with more than `MOST` parameters is called with fake tensors,
    which need no memory; its own errors are not problems then, because not all operators accept these.
    """
    problems: list[Problem] = []
    with torch.random.fork_rng(), _collecting(problems), torch.enable_grad():
        with _blaming(("data", "train", "_target_")):
            loader = load_data(replace(spec, data=replace(spec.data, num_workers=0)), ranks, trust)
            batch = next(iter(loader))
        with _blaming(_MODEL):
            model = _build(spec, trust)
        objective = build_objective(spec, model, torch.device("cpu"), trust)
        if not any(parameter.is_meta for parameter in model.parameters()):
            problems += _call(spec, objective, model, batch)
            return problems
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            fakes = {
                name: torch.empty_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)
                for name, tensor in tensors.items()
            }

            def call(*args: Any, **keywords: Any) -> Any:
                return torch.func.functional_call(model, fakes, args, keywords)

            try:
                problems += _call(spec, objective, call, tree_map_only(Tensor, mode.from_tensor, batch))
            except Exception as error:
                if isinstance(error, DsjobError):
                    raise
    return problems


def _build(spec: JobSpec, trust: Trust) -> nn.Module:
    assert spec.model is not None
    try:
        sized = build_on_meta(spec.model, trust)
    except UsageError:  # it needs real tensors
        return build_model(spec.model, trust)
    large = sum(parameter.numel() for parameter in sized.parameters()) > MOST
    return sized if large else build_model(spec.model, trust)


def _call(spec: JobSpec, objective: Objective, model: Any, batch: Any) -> Iterator[Problem]:
    with _blaming(("inputs",) if spec.inputs is not None else _MODEL):
        outputs = objective.call(model, batch)
    where: Path = ("loss", "_target_") if spec.loss else ("losses",) if spec.losses else ("label_smoothing",)
    with warnings.catch_warnings(record=True) as caught, _blaming(where if objective.terms else _MODEL):
        warnings.simplefilter("always")
        objective.find(outputs, batch)
    for warning in caught:
        text = " ".join(str(warning.message).split())
        yield Problem(text, where, "one-batch", "compare the shapes of predictions and targets", severity="warning")


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Errors without a place are those of the value at `path`."""
    try:
        yield
    except Exception as error:
        put_at(error, path)
        raise


@contextmanager
def _collecting(problems: list[Problem]) -> Iterator[None]:
    """Turns an error into a problem of the document."""
    try:
        yield
    except DsjobError as error:
        problems.append(replace(error.to_problem(), rule="one-batch"))
    except Exception as error:
        path = find_path(error)
        problems.append(Problem(describe_failure(error).removeprefix(f"{name_target(path)}: "), path, "one-batch"))
