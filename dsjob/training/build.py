"""Builds the objects of a resolved job. Each function builds one part and can be called on its own.

Training builds all of them (`dsjob.training.job`). An evaluation needs the models, the evaluation data, engines without
an optimizer, and a checkpointer to load weights. `dsjob.load_model` needs one model.

Parts that draw random numbers are built in a fixed order. Models are built with `trainer.seed` on every rank, so that
their initial weights are equal. Everything that is built after the engines uses a different seed on each data-parallel
rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from dsjob.callbacks.callback import Callback
from dsjob.contract.models import is_trainable
from dsjob.contract.paths import Path
from dsjob.contract.resolved import ResolvedJob, ResolvedModel
from dsjob.contract.spec import JobSpec, Target, make_target
from dsjob.contract.spec import Trainer as Lengths
from dsjob.engine.choice import build_job_engine
from dsjob.engine.several import Engines
from dsjob.errors import ContractError, DataError
from dsjob.monitors import SERVICES
from dsjob.monitors.monitor import Monitor
from dsjob.optim.schedules import settle_length
from dsjob.parallel.pipeline.passes import StagePasses
from dsjob.ranks.agreement import all_gather, on_rank_0
from dsjob.ranks.divide import divide_axes
from dsjob.ranks.failures import follows_from_another
from dsjob.ranks.mesh import World
from dsjob.ranks.mpu import divide
from dsjob.ranks.seeding import seed_rng
from dsjob.text.generation import Generator, require_decoding
from dsjob.text.tokenizers import BYTES, ByteTokenizer
from dsjob.training.averaging import Averaging
from dsjob.training.evaluation import Evaluator
from dsjob.training.metric_inputs import list_outputs
from dsjob.training.metrics import Measure, Measures, make_measure
from dsjob.training.objective import Objective, build_objective
from dsjob.training.passed import NEVER
from dsjob.training.steps import MicroStep, UserStep, make_micro_step
from dsjob.training.trainer import METHODS, UNUSED, Parts, Trainer
from dsjob.training.vocabulary import Say, choose_loss
from dsjob.trust.frames import put_at
from dsjob.trust.grant import Trust
from dsjob.trust.hub import name_tokenizer
from dsjob.trust.targets import (
    build_callable,
    build_instance,
    build_object,
    call_target,
    placing_section,
    placing_target,
)

T = TypeVar("T")
MakeModel = Callable[[Target, Trust, Path], nn.Module]


def build_model(target: Target, trust: Trust, where: Path = ("model",)) -> nn.Module:
    """Builds one model. `where`: its place in the document, for errors.

    Raises ContractError if the target does not return a torch.nn.Module, and TargetError if calling it fails.
    """
    return build_instance(target, nn.Module, "a torch.nn.Module", trust, where)


def build_models(job: ResolvedJob, trust: Trust, make: MakeModel = build_model) -> dict[str, nn.Module]:
    """Builds all models on the CPU, by name, one after the other from a single seed. Models that are not trained get
    requires_grad=False. Raises the errors of `build_model`, which `make` replaces.
    """
    seed_rng(job.spec.trainer.seed)  # the same on every rank, so that all ranks have the same initial weights
    models = {}
    for name, resolved in job.models.items():
        assert resolved.spec.model is not None
        where = ("models", name, "model") if job.spec.models else ("model",)
        models[name] = make(resolved.spec.model, trust, where)
        if not is_trainable(job.document, name):
            # Before its engine is built, which gives only trained parameters a master and optimizer state.
            models[name].requires_grad_(False)
    return models


def divide_ranks(spec: JobSpec, world: World, trust: Trust) -> World:
    """Divides the ranks as the document says, or with `trainer.mpu`, if there is one. A collective if they are.

    Raises UsageError, ContractError; errors of the mpu's own code pass through.
    """
    pipe, context, tensor = spec.pipeline.size, spec.context_parallel.size, spec.tensor_parallel.ranks
    if max(pipe, context, tensor) > 1:
        divided = divide_axes(world, pipe=pipe, context=context, tensor=tensor)
        # Only the last stage has losses, and outputs for metrics. The ranks along the other axes all have the same.
        last = divided.pipe.rank == divided.pipe.size - 1
        return dataclasses.replace(divided, reports=last and divided.context.rank == divided.tensor.rank == 0)
    mpu = call_target(spec.trainer.mpu, trust=trust, where=("trainer", "mpu")) if spec.trainer.mpu else None
    try:
        divided, parts = divide(world, mpu), spec.trainer.model_parallel_size
    except Exception as error:
        if not follows_from_another(error):
            put_at(error, ("trainer", "mpu", "_target_"))
        raise
    if divided.model.size != parts:
        raise ContractError(
            f"trainer.mpu splits a model over {divided.model.size} ranks, but trainer.model_parallel_size is {parts}",
            hint=f"trainer.model_parallel_size={divided.model.size}",
        )
    steps = {
        "trainer.step": spec.trainer.step,
        **({"trainer.eval_step": spec.trainer.eval_step} if spec.data.eval else {}),
    }
    missing = [name for name, step in steps.items() if step is None]
    if missing and not all(all_gather(world.everyone, divided.loads)):
        raise ContractError(
            f"some ranks build no loader, according to trainer.mpu, so {missing[0]} is required and is not set",
            hint=f"set {missing[0]}: {{_target_: my_module.step}}; on these ranks it is called with (engines, None)",
        )
    return divided


def build_engines(
    models: Mapping[str, nn.Module],
    job: ResolvedJob,
    world: World,
    trust: Trust,
    *,
    steps: int | None = None,
    parts: Parts | None = None,
    passes: StagePasses | None = None,
) -> Engines:
    """Builds an engine around each model, moves the models to the device and shards them. A collective.

    `steps`: optimizer steps of the whole run, which set the length of schedules; None builds engines that do not
    train: dsjob's own engines without optimizer and schedule. Raises UsageError, TargetError, and ContractError for a
    model without anything to train.

    parts: builds optimizers and schedules, if its class replaces these methods. passes: of a pipeline.
    """
    engines = {}
    for name, model in models.items():
        if steps is not None and is_trainable(job.document, name):
            _require_parameters(model, ("models", name, "model") if job.spec.models else ("model",))
        with placing_section(job.document, name):
            settled = _settle(job.models[name], steps)
            own = parts.build_methods(settled.spec, steps) if parts is not None and steps is not None else {}
            engines[name] = build_job_engine(model, settled, world, trust=trust, pipeline=passes, **own)
    return Engines(engines)


def _require_parameters(model: nn.Module, where: Path) -> None:
    """Raises ContractError for a model without anything to train, before its optimizer fails on an empty list."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    frozen = any(True for _ in model.parameters())
    what = "requires_grad is False for all of its parameters" if frozen else "it has no parameters"
    error = ContractError(f"the model {type(model).__name__} cannot be trained: {what}")
    error.put_at((*where, "_target_"))
    raise error


def _settle(model: ResolvedModel, steps: int | None) -> ResolvedModel:
    """The model's job with the length of its schedule filled in; without optimizer and schedule if `steps` is None."""
    spec = model.spec
    if steps is None:
        spec = dataclasses.replace(spec, optimizer=None, scheduler=None, engine="dsjob")
    elif spec.scheduler is not None:
        spec = dataclasses.replace(spec, scheduler=settle_length(spec.scheduler, steps))
    return dataclasses.replace(model, spec=spec)


def count_steps(trainer: Lengths, samples: int | None) -> int:
    """Optimizer steps of the run; NEVER if only tokens or time limit it. `samples`: length of the dataset, None for a
    stream.

    Raises DataError if only the number of epochs limits the run, and the dataset has no length.
    """
    limits = []
    if trainer.max_steps is not None:
        limits.append(trainer.max_steps)
    if trainer.max_epochs is not None:
        if samples is None:
            raise DataError("trainer.max_epochs needs a dataset with a length", hint="give trainer.max_steps instead")
        # Rounded up: every sample is seen at least `max_epochs` times, and the last batch is full.
        limits.append(math.ceil(trainer.max_epochs * samples / trainer.train_batch))
    length = trainer.max_length
    if length is not None and not length.measured:
        if length.unit == "epochs" and samples is None:
            raise DataError("trainer.max_length in epochs needs a dataset with a length", hint="give steps or samples")
        each = {"steps": trainer.train_batch, "epochs": samples or 0, "samples": 1}[length.unit]
        limits.append(math.ceil(length.amount * each / trainer.train_batch))
    return min(limits, default=NEVER)


def _to_device(made: T, device: torch.device) -> T:
    """Moves a metric to the device if it is a module."""
    return made.to(device) if isinstance(made, nn.Module) else made


def build_measures(
    phase: Literal["eval", "train"], spec: JobSpec, world: World, trust: Trust
) -> tuple[Measures, dict[str, Any]]:
    """The metrics of a phase, and the user's metric objects by name. A collective if there are any.

    Raises TargetError, ContractError.
    """
    measures: dict[str, Measure] = {}
    objects: dict[str, Any] = {}
    for name, metric in spec.metrics.items():
        if phase not in metric.phases:
            continue
        made = objects[name] = _to_device(build_object(metric.target, trust, ("metrics", name)), world.device)
        reduce = _build_reduce(metric.reduce, name, trust)
        with placing_target(("metrics", name)):
            measures[name] = make_measure(name, made, inputs=metric.inputs, reduce=reduce, device=world.device)
    return Measures(phase, world, measures), objects


def _build_reduce(target: Target | None, name: str, trust: Trust) -> Callable[[list[Any]], Any] | None:
    if target is None:
        return None
    return build_callable(target, f"metrics.{name}.reduce", trust, ("metrics", name, "reduce"))


def build_averaging(spec: JobSpec, engines: Engines, objective: Objective) -> Averaging:
    """The weights of batches in a mean: proportional to their number of targets, or equal."""
    by_targets = spec.trainer.loss_average == "targets" and spec.trainer.step is None
    # DeepSpeed's engine cannot correct gradients by counts that are known only after the last forward pass.
    by_targets = by_targets and engines.first.divides_gradients
    return Averaging(engines.first.world, by_targets=by_targets, objective=objective)


def build_parts(spec: JobSpec, trust: Trust) -> Parts:
    """The methods of `trainer.parts`, or of a Trainer without parts of its own.

    Raises ContractError if it is not a Trainer, or has a method of HF's Trainer that is never called; TargetError.
    """
    target, where = spec.trainer.parts, ("trainer", "parts")
    if target is None:
        return Parts(Trainer(), spec, trust)
    parts = Parts(build_instance(target, Trainer, "a dsjob.Trainer", trust, where), spec, trust)
    steps = {"training_step": spec.trainer.step, "prediction_step": spec.trainer.eval_step}
    problems = [f"has {name}, which is never called" for name in UNUSED if hasattr(parts.trainer, name)]
    problems += [
        f"has {name}, but trainer.{key} is set, which is called instead"
        for (name, step), key in zip(steps.items(), ("step", "eval_step"), strict=True)
        if step is not None and parts.overrides(name)
    ]
    if problems:
        error = ContractError(f"{target.path} {problems[0]}", hint=f"methods: {', '.join(METHODS)}")
        error.put_at((*where, "_target_"))
        raise error
    return parts


def build_micro_step(
    spec: JobSpec, engines: Engines, objective: Objective, measures: Measures, trust: Trust, parts: Parts, say: Say
) -> MicroStep:
    """The training step for one micro batch: `trainer.step`, or the training_step of `parts` if its class replaces
    it, or the forward pass and loss of `objective`. say: tells the user once how the loss is computed.

    Raises TargetError; ContractError where `ops` requires what is not possible.
    """
    step = build_callable(spec.trainer.step, "trainer.step", trust) if spec.trainer.step else None
    method = parts.run_training_step if parts.overrides("training_step") else None
    vocabulary = choose_loss(engines.first, spec, say, own_step=bool(step or method), measured=len(measures) > 0)
    return make_micro_step(step, objective, measures, list_taken(spec), method, vocabulary)


def build_eval_step(spec: JobSpec, trust: Trust) -> UserStep | None:
    """`trainer.eval_step`, if there is one. Raises TargetError."""
    return build_callable(spec.trainer.eval_step, "trainer.eval_step", trust) if spec.trainer.eval_step else None


def build_generator(spec: JobSpec, trust: Trust) -> Generator | None:
    """What generates in evaluation and prediction, if the document asks for it. Raises ContractError, DataError,
    TargetError."""
    return None if spec.generation is None else make_generator(spec.generation, trust)


def make_generator(section: Mapping[str, Any], trust: Trust) -> Generator:
    """A generator with the settings of a section `generation`. Raises as `build_generator`."""
    settings = {key: value for key, value in section.items() if key != "tokenizer"}
    named = section.get("tokenizer")
    if named is None or named == BYTES:
        return Generator(settings, ByteTokenizer() if named else None)
    if isinstance(named, str):
        named = name_tokenizer(named)
    where = ("generation", "tokenizer")
    with placing_target(where):
        return Generator(settings, require_decoding(call_target(make_target(named), trust=trust, where=where)))


def build_evaluator(
    spec: JobSpec,
    engines: Engines,
    sets: Mapping[str, Any],
    trust: Trust,
    *,
    collate: Any = None,
    objective: Objective | None = None,
    measures: Measures | None = None,
) -> Evaluator:
    """The evaluator of `sets` (see `build_evaluation_sets`). It uses `trainer.eval_step`, or the model and `objective`
    (see `build_objective`).

    `measures`: the metrics of phase `eval`. Raises TargetError.
    """
    objective = objective or build_objective(spec, engines.first.module, engines.first.device, trust)
    return Evaluator(
        spec,
        engines,
        sets,
        collate=collate,
        objective=objective,
        step=build_eval_step(spec, trust),
        averaging=build_averaging(spec, engines, objective),
        measures=measures if measures is not None else Measures(),
        taken=list_taken(spec),
        generator=build_generator(spec, trust),
    )


def list_taken(spec: JobSpec) -> set[str]:
    """Names of outputs that `trainer.step` and `trainer.eval_step` return only as inputs of metrics."""
    return {name for metric in spec.metrics.values() for name in list_outputs(metric.inputs)}


def build_callbacks(spec: JobSpec, trust: Trust) -> dict[str, Callback]:
    """The callbacks of the document, by name. Raises ContractError if one is not a Callback or has an unknown hook."""
    return {name: _build_callback(name, target, trust) for name, target in spec.callbacks.items()}


def _build_callback(name: str, target: Target, trust: Trust) -> Callback:
    where = ("callbacks", name)
    built = build_instance(target, Callback, "a dsjob Callback", trust, where)
    hooks = [hook for hook in vars(Callback) if hook.startswith("on_")]
    for hook in dir(type(built)):
        if hook.startswith("on_") and hook not in hooks and callable(getattr(type(built), hook)):
            message = f"callbacks.{name}: {target.path} has {hook}, which is never called"
            error = ContractError(message, hint=f"hooks: {', '.join(hooks)}")
            error.put_at((*where, "_target_"))
            raise error
    return built


def build_monitors(spec: JobSpec, world: World, trust: Trust) -> dict[str, Monitor]:
    """The monitors by name, on rank 0; {} on the other ranks. A collective if there are any.

    Raises ContractError if one is not a Monitor, TargetError.
    """
    made: dict[str, Monitor] = {}

    def build() -> None:
        for name, service in SERVICES.items():
            if (section := getattr(spec.monitor, name)) is not None and section.enabled:
                made[name] = service.build(section)
        for name, target in spec.monitor.custom.items():
            made[name] = build_instance(target, Monitor, "a dsjob Monitor", trust, ("monitor", "custom", name))

    on_rank_0(world.everyone, build)
    return made
