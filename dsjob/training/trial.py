"""Calls a job's model, losses and metrics with one batch of each of its sets, to find mistakes in what the document
says about them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsjob.compute.calls import Loss
from dsjob.contract.models import is_trainable, list_models
from dsjob.contract.paths import Path
from dsjob.contract.spec import Generation, JobSpec, Method, Ops, Sets
from dsjob.data import is_loader
from dsjob.document.resolve import view_model
from dsjob.engine.build import build_engine
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.errors import DsjobError, MetricError, Problem, UsageError, name_target
from dsjob.ranks.mesh import World
from dsjob.text.generation import Generator
from dsjob.torch_private import FakeTensorMode, tree_map_only
from dsjob.training.build import build_eval_step, build_measures, build_model, build_parts, list_taken, make_generator
from dsjob.training.directions import require_best
from dsjob.training.evaluation import name_data, read_set
from dsjob.training.loaders import build_collate, build_evaluation_sets, build_training_data
from dsjob.training.metric_inputs import Seen
from dsjob.training.metrics import Measures
from dsjob.training.objective import Objective, build_objective
from dsjob.training.predict import choose_rows
from dsjob.training.probe import build_on_meta
from dsjob.training.steps import UserStep, read_scalars
from dsjob.training.trainer import Parts
from dsjob.trust.frames import describe_failure, find_path, put_at
from dsjob.trust.grant import Trust
from dsjob.trust.targets import build_callable

RULE = "one-batch"
MOST = 250_000_000  # parameters of a model that is built to be tried; a larger one is tried on fake tensors
_MODEL: Path = ("model", "_target_")
_OWN: Path = ("trainer", "step", "_target_")
_STEP: Path = ("trainer", "eval_step", "_target_")
_PARTS: Path = ("trainer", "parts", "_target_")
_FEW = 2  # samples of a small batch: batch norm needs more than one
_GPU = re.compile(r"\b(cuda|gpus?|hip|nvidia|rocm|triton)\b", re.IGNORECASE)
_TOKENS = 4  # that are generated for each sample
_STILL = Method("SGD", {"lr": 0.0}, None)
_ALONE = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))


def can_try(spec: JobSpec) -> bool:
    """Whether a document has a model and data. A model that `trainer.mpu` splits needs its ranks."""
    has_data = spec.data.train is not None or bool(spec.data.list_sets("eval", "test"))
    return has_data and (spec.model is not None or bool(spec.models)) and spec.trainer.mpu is None


def says_how(spec: JobSpec) -> bool:
    """Whether the document says how its models are called, trained or evaluated, what their loss is, what the metrics
    or the predictions are."""
    called = (spec.inputs, spec.targets, spec.outputs, spec.losses, spec.label_smoothing, spec.trainer.step)
    return any((*called, spec.metrics, spec.generation, spec.trainer.eval_step, _predicts(spec)))


def _reduce(spec: JobSpec) -> JobSpec:
    """The job with small micro batches."""
    few = min(spec.trainer.micro_batch, _FEW)
    return replace(spec, trainer=replace(spec.trainer, micro_batch=few, eval_micro_batch=_FEW))


def _predicts(spec: JobSpec) -> bool:
    return "predict" in spec.tasks or spec.predict.outputs is not None


def try_on_batch(document: Mapping[str, Any], spec: JobSpec, ranks: int, trust: Trust) -> list[Problem]:
    """The problems that one micro batch of the training data and one batch of each set of `data.eval` and `data.test`
    show. document: a resolved one; spec: the view of it. ranks: the number of data-parallel ranks.

    Reads data and builds the model on the CPU. A model with more than `MOST` parameters is called with fake tensors,
    which need no memory; its own errors are not problems then, because not all operators accept these, and metrics are
    not tried. Unless the document `says_how`, batches have few samples, so that it takes little time.
    """
    problems: list[Problem] = []
    spec = replace(spec, data=replace(spec.data, num_workers=0))
    whole, spec = spec, spec if says_how(spec) else _reduce(spec)
    with torch.random.fork_rng(), _collecting(problems):
        parts = build_parts(spec, trust)
        batch: Any = None
        if spec.data.train is not None:
            with _blaming(("data", "train", "_target_")):
                data = parts.trainer.get_train_dataloader()
                sized = whole if spec.data.loader or is_loader(data) else spec  # a loader has a batch size of its own
                collate, world = build_collate(spec, trust), replace(_ALONE, data_size=ranks)
                batch = next(iter(build_training_data(sized, world, collate, trust, lambda: data)))
        trial = _build_trial(document, spec, parts, trust)
        if batch is not None:
            with torch.enable_grad():
                trial.train(batch, problems)
        if not any(problem.severity == "error" for problem in problems):
            trial.evaluate(problems)
    return problems


@dataclass
class Trial:
    """The parts of a job that are called with batches.

    model: the first one. engines: for the user's own code, which receives them; None if there is none, or a model is
    too large. own: `trainer.step`. step, generator: see `Evaluator`. failed: metrics with a known problem.
    """

    spec: JobSpec
    trust: Trust
    objective: Objective
    model: nn.Module
    parts: Parts
    engines: Engines | None = None
    own: UserStep | None = None
    step: UserStep | None = None
    generator: Generator | None = None
    failed: set[str] = field(default_factory=set)

    @property
    def is_large(self) -> bool:
        """Whether the model has no real tensors."""
        return _is_large(self.model)

    def train(self, batch: Any, problems: list[Problem]) -> None:
        """Calls the model, the losses and the metrics of training. Raises their errors, except for those of metrics."""
        if self.parts.overrides("training_step"):  # it would need an optimizer
            return
        if self.own is not None:
            if self.engines is not None:
                with _blaming(_OWN):
                    outputs = self.own(self.engines, batch)
                    read_scalars(outputs, "trainer.step", list_taken(self.spec))
                self._measure("train", outputs, [], batch, self.spec.trainer.micro_batch, problems)
        elif self.parts.overrides("compute_loss"):
            if self.engines is not None:
                with _blaming(_PARTS):
                    called = self.objective.compute(self.engines.first, batch)
                self._measure("train", *called, batch, self.spec.trainer.micro_batch, problems)
        elif (found := self._call(batch, problems)) is not None:
            self._measure("train", *found, batch, self.spec.trainer.micro_batch, problems)

    @torch.no_grad()
    def evaluate(self, problems: list[Problem]) -> None:
        """Calls the model, the losses and the metrics with a batch of each set."""
        for model in (self.model, *(engine.module for engine in (self.engines or {}).values())):
            model.eval()
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
            sets = build_evaluation_sets(spec, _ALONE, collate, self.trust, "eval", "test", read=self.parts.read_set)
            pairs = read_set(spec, _ALONE, sets[prefix], name_data(prefix), collate=collate, max_batches=1)
            batch, samples = next(iter(pairs))
        if role == "test" and "eval" not in self.spec.tasks:
            self._predict(batch, samples, problems)
            return
        if self.step is not None or self.parts.overrides("compute_loss") or self.parts.overrides("prediction_step"):
            if self.engines is not None:
                self._evaluate_own(self.engines, batch, samples, problems)
        elif (found := self._call(batch, problems)) is not None:
            self._measure("eval", self._generate(batch, found[0]), found[1], batch, samples, problems)
        if _predicts(self.spec) and role == ("test" if data.list_sets("test") else "eval"):
            self._predict(batch, samples, problems)

    def _predict(self, batch: Any, samples: int, problems: list[Problem]) -> None:
        """Calls what predictions call, and chooses what they write. They need no targets."""
        outputs = None
        if self.generator is not None:
            outputs = self._generate(batch)
        elif self.step is not None or any(map(self.parts.overrides, ("prediction_step", "compute_loss"))):
            if self.engines is not None:
                with _blaming(_STEP if self.step is not None else _PARTS):
                    first = self.engines.first
                    outputs = self.step(self.engines, batch) if self.step else self.objective.answer(first, batch)
        elif (found := self._call(batch, problems, losses=False)) is not None:
            outputs = found[0]
        if outputs is not None and _predicts(self.spec):
            with _blaming(("predict", "outputs") if self.spec.predict.outputs else _MODEL):
                choose_rows(self.spec, self.objective, Seen(outputs, batch, None, samples), own=self.step is not None)

    def _evaluate_own(self, engines: Engines, batch: Any, samples: int, problems: list[Problem]) -> None:
        """Calls `trainer.eval_step`, or the methods of `trainer.parts`, and the metrics."""
        if self.step is not None:
            with _blaming(_STEP):
                outputs, losses = self.step(engines, batch), list[Loss]()
                read_scalars(outputs, "trainer.eval_step", list_taken(self.spec))
        else:
            with _blaming(_PARTS):
                outputs, losses, batch = self.objective.evaluate(engines.first, batch)
            outputs = self._generate(batch, outputs)
        self._measure("eval", outputs, losses, batch, samples, problems)

    def _generate(self, batch: Any, outputs: Any = None) -> Any:
        """`outputs`, with what the model generates for a batch, if the job asks for it."""
        if self.generator is None or self.is_large:
            return outputs
        with _blaming(("generation",)):
            return self.generator.write(self.model, _ALONE.device, batch, outputs)

    def _call(self, batch: Any, problems: list[Problem], *, losses: bool = True) -> tuple[Any, list[Loss]] | None:
        """The model's output and the losses; None if the model is too large for real tensors."""
        if not self.is_large:
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
        # A step of the user's has no losses, and its metrics receive nothing that the document chooses.
        total = self.objective.add([loss.mean.detach() for loss in losses]) if losses else None
        objective = self.objective if losses else None
        for name, metric in self.spec.metrics.items():
            if phase not in metric.phases or name in self.failed:
                continue
            found: list[Problem] = []
            with _collecting(found), _blaming(("metrics", name, "_target_")):
                alone = replace(self.spec, metrics={name: metric})
                measures, objects = build_measures(phase, alone, _ALONE, self.trust)
                require_best(self.spec, objects if phase == "eval" else {})
                measures.start()
                measures.feed(outputs, batch, total, samples, objective)
                try:
                    measures.finish()
                except MetricError as error:  # one batch may not be enough: it may have a single class
                    error.put_at(("metrics", name, "_target_"))
                    hint = "ignore this if all of the data is enough for it"
                    found.append(replace(error.to_problem(), rule=RULE, hint=hint, severity="warning"))
            if found:
                self.failed.add(name)
            problems += found


def _build_trial(document: Mapping[str, Any], spec: JobSpec, parts: Parts, trust: Trust) -> Trial:
    models = {}
    for name in list_models(document):
        with _blaming(("models", name, *_MODEL) if spec.models else _MODEL):
            models[name] = _build(view_model(document, name), trust)
        if not is_trainable(document, name):
            models[name].requires_grad_(False)
    model = next(iter(models.values()))
    objective = build_objective(spec, model, _ALONE.device, trust)
    trial = Trial(spec, trust, objective, model, parts)
    trial.own = build_callable(spec.trainer.step, "trainer.step", trust) if spec.trainer.step else None
    if spec.data.list_sets("eval", "test"):
        trial.step = build_eval_step(spec, trust)
        trial.generator = None if spec.generation is None else make_generator(_shorten(spec.generation, model), trust)
    steps = (trial.own, trial.step, spec.trainer.parts)
    if any(step is not None for step in steps) and not any(map(_is_large, models.values())):
        trains = trial.own is not None
        with _blaming(("models",) if spec.models else _MODEL):
            trial.engines = Engines(
                {
                    name: _build_engine(
                        each, view_model(document, name), trust, trains and is_trainable(document, name)
                    )
                    for name, each in models.items()
                }
            )
        trial.objective = parts.bind(trial.engines, objective, Measures())
    return trial


def _is_large(model: nn.Module) -> bool:
    """Whether a model has no real tensors."""
    return any(parameter.is_meta for parameter in model.parameters())


def _build_engine(model: nn.Module, spec: JobSpec, trust: Trust, trains: bool) -> Engine:
    """An engine in fp32, because a CPU may lack operators in half precision. One that `trains` has a plain optimizer,
    whose steps change nothing."""
    plain = replace(
        spec,
        bf16=replace(spec.bf16, enabled=False),
        fp16=replace(spec.fp16, enabled=False),
        compile=replace(spec.compile, enabled=False),
        ops=Ops("off", "off", "off", "off", "off"),
        zero_optimization=replace(
            spec.zero_optimization, stage=0, offload_param=None, offload_optimizer=None, leaf_module=None
        ),
        optimizer=_STILL if trains else None,
        scheduler=None,
    )
    return build_engine(model, plain, _ALONE, kind=Engine, trust=trust)


def _shorten(section: Generation, model: nn.Module) -> dict[str, Any]:
    """The section `generation` with few new tokens."""
    settings = dict(section)
    if hasattr(model, "generation_config"):  # of transformers: other models may not take keys that the job lacks
        settings = {key: value for key, value in settings.items() if key not in ("max_length", "min_length")}
        settings.setdefault("max_new_tokens", _TOKENS)
    for key in settings.keys() & {"max_new_tokens", "min_new_tokens"}:
        settings[key] = min(settings[key], _TOKENS)
    return settings


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
        problems.append(_excuse(replace(error.to_problem(), rule=RULE)))
    except Exception as error:
        path = find_path(error)
        problems.append(_excuse(Problem(describe_failure(error).removeprefix(f"{name_target(path)}: "), path, RULE)))


def _excuse(problem: Problem) -> Problem:
    """A warning in place of an error that comes from the lack of a GPU here."""
    if torch.cuda.is_available() or not _GPU.search(problem.message):
        return problem
    return replace(problem, severity="warning", hint="this machine has no GPU; try it where the job will run")
