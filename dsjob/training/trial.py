"""Calls a job's model, losses and metrics with one batch of each of its sets, to find mistakes in what the document
says about them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsjob.compute.calls import Loss
from dsjob.contract.paths import Path
from dsjob.contract.spec import JobSpec, Sets
from dsjob.errors import DsjobError, MetricError, Problem, UsageError, name_target
from dsjob.ranks.mesh import World
from dsjob.torch_private import FakeTensorMode, tree_map_only
from dsjob.training.build import build_measures, build_model
from dsjob.training.evaluation import name_data, read_set
from dsjob.training.loaders import build_collate, build_evaluation_sets
from dsjob.training.objective import Objective, build_objective
from dsjob.training.probe import build_on_meta, load_data
from dsjob.trust.frames import describe_failure, find_path, put_at
from dsjob.trust.grant import Trust

RULE = "one-batch"
MOST = 250_000_000  # parameters of a model that is built to be tried; a larger one is tried on fake tensors
_MODEL: Path = ("model", "_target_")
_ALONE = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))


def is_worth_trying(spec: JobSpec) -> bool:
    """Whether the document says how its model is called, what its loss is or what its metrics are, and dsjob makes
    these calls itself."""
    says = (spec.inputs, spec.targets, spec.outputs, spec.losses, spec.label_smoothing, spec.metrics)
    return (
        any(says)
        and (spec.data.train is not None or bool(spec.data.list_sets("eval", "test")))
        and spec.model is not None
        and spec.trainer.step is None
        and spec.trainer.mpu is None
    )


def try_on_batch(spec: JobSpec, ranks: int, trust: Trust) -> list[Problem]:
    """The problems that one micro batch of the training data and one batch of each set of `data.eval` and `data.test`
    show. ranks: the number of data-parallel ranks.

    Reads data and builds the model on the CPU. A model with more than `MOST` parameters is called with fake tensors,
    which need no memory; its own errors are not problems then, because not all operators accept these, and metrics are
    not tried.
    """
    problems: list[Problem] = []
    spec = replace(spec, data=replace(spec.data, num_workers=0))
    with torch.random.fork_rng(), _collecting(problems):
        batch: Any = None
        if spec.data.train is not None:
            with _blaming(("data", "train", "_target_")):
                batch = next(iter(load_data(spec, ranks, trust)))
        with _blaming(_MODEL):
            model = _build(spec, trust)
        objective = build_objective(spec, model, torch.device("cpu"), trust)
        trial = Trial(spec, trust, objective, model)
        if batch is not None:
            with torch.enable_grad():
                trial.train(batch, problems)
        if not any(problem.severity == "error" for problem in problems):
            trial.evaluate(problems)
    return problems


@dataclass
class Trial:
    """The parts of a job that are called with batches. failed: metrics with a known problem."""

    spec: JobSpec
    trust: Trust
    objective: Objective
    model: nn.Module
    failed: set[str] = field(default_factory=set)

    @property
    def _evaluates(self) -> bool:
        """Whether dsjob evaluates with the model and the losses alone, and with real tensors."""
        others = (self.spec.trainer.eval_step, self.spec.trainer.parts, self.spec.generation)
        return all(other is None for other in others)

    def train(self, batch: Any, problems: list[Problem]) -> None:
        """Calls the model, the losses and the metrics of training. Raises their errors, except for those of metrics."""
        called = self._call(batch, problems)
        if called is not None and self.spec.trainer.parts is None:
            self._measure("train", *called, batch, self.spec.trainer.micro_batch, problems)

    @torch.no_grad()
    def evaluate(self, problems: list[Problem]) -> None:
        """Calls the model, the losses and the metrics with a batch of each set."""
        self.model.eval()
        for prefix in self.spec.data.list_sets("eval", "test"):
            found: list[Problem] = []
            with _collecting(found):
                self._evaluate(prefix, found)
            shown = f" (on a batch of {name_data(prefix)})"
            problems += [
                each if each.path[:1] == ("data",) else replace(each, message=each.message + shown) for each in found
            ]

    def _evaluate(self, prefix: str, problems: list[Problem]) -> None:
        role, _, name = prefix.partition("/")
        data = self.spec.data
        chosen, none = Sets({name: (data.eval if role == "eval" else data.test)[name]}), Sets({})
        data = replace(data, eval=chosen if role == "eval" else none, test=chosen if role == "test" else none)
        spec, collate = replace(self.spec, data=data), build_collate(self.spec, self.trust)
        with _blaming(("data", *prefix.split("/"), "_target_")):
            sets = build_evaluation_sets(spec, _ALONE, collate, self.trust, "eval", "test")
            pairs = read_set(spec, _ALONE, sets[prefix], name_data(prefix), collate=collate, max_batches=1)
            batch, samples = next(iter(pairs))
        if not self._evaluates:
            return
        if role == "test" and "eval" not in self.spec.tasks:  # predictions need no targets
            self._call(batch, problems, losses=False)
            return
        called = self._call(batch, problems)
        if called is not None:
            self._measure("eval", *called, batch, samples, problems)

    def _call(self, batch: Any, problems: list[Problem], *, losses: bool = True) -> tuple[Any, list[Loss]] | None:
        """The model's output and the losses; None if the model is too large for real tensors."""
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            return _call(self.spec, self.objective, self.model, batch, problems, losses=losses)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            fakes = {
                name: torch.empty_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)
                for name, tensor in tensors.items()
            }

            def call(*args: Any, **keywords: Any) -> Any:
                return torch.func.functional_call(self.model, fakes, args, keywords)

            try:
                fake = tree_map_only(Tensor, mode.from_tensor, batch)
                _call(self.spec, self.objective, call, fake, problems, losses=losses)
            except Exception as error:
                if isinstance(error, DsjobError):
                    raise
        return None

    def _measure(
        self,
        phase: Literal["eval", "train"],
        outputs: Any,
        losses: list[Loss],
        batch: Any,
        samples: int,
        problems: list[Problem],
    ) -> None:
        """Feeds the metrics of a phase one by one, so that each shows its own problem."""
        total = self.objective.add([loss.mean.detach() for loss in losses])
        for name, metric in self.spec.metrics.items():
            if phase not in metric.phases or name in self.failed:
                continue
            found: list[Problem] = []
            with _collecting(found), _blaming(("metrics", name, "_target_")):
                alone = replace(self.spec, metrics={name: metric})
                measures, _ = build_measures(phase, alone, _ALONE, self.trust)
                measures.start()
                measures.feed(outputs, batch, total, samples, self.objective)
                try:
                    measures.finish()
                except MetricError as error:  # one batch may not be enough: it may have a single class
                    error.put_at(("metrics", name, "_target_"))
                    hint = "ignore this if all of the data is enough for it"
                    found.append(replace(error.to_problem(), rule=RULE, hint=hint, severity="warning"))
            if found:
                self.failed.add(name)
            problems += found


def _build(spec: JobSpec, trust: Trust) -> nn.Module:
    assert spec.model is not None
    try:
        sized = build_on_meta(spec.model, trust)
    except UsageError:  # it needs real tensors
        return build_model(spec.model, trust)
    large = sum(parameter.numel() for parameter in sized.parameters()) > MOST
    return sized if large else build_model(spec.model, trust)


def _call(
    spec: JobSpec, objective: Objective, model: Any, batch: Any, problems: list[Problem], *, losses: bool
) -> tuple[Any, list[Loss]]:
    with _blaming(("inputs",) if spec.inputs is not None else _MODEL):
        outputs = objective.call(model, batch)
    if not losses:
        return outputs, []
    where: Path = ("loss", "_target_") if spec.loss else ("losses",) if spec.losses else ("label_smoothing",)
    with warnings.catch_warnings(record=True) as caught, _blaming(where if objective.terms else _MODEL):
        warnings.simplefilter("always")
        found = objective.find(outputs, batch)
    for warning in caught:
        text = " ".join(str(warning.message).split())
        hint = "compare the shapes of predictions and targets"
        problems.append(Problem(text, where, RULE, hint, severity="warning"))
    return outputs, found


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
        problems.append(replace(error.to_problem(), rule=RULE))
    except Exception as error:
        path = find_path(error)
        problems.append(Problem(describe_failure(error).removeprefix(f"{name_target(path)}: "), path, RULE))
