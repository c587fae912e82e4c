"""From a resolved job to its objects. Each function builds one part and can be called alone.

Training builds all of them (`dsjob.training.job`). An evaluation needs the models, the evaluation data, engines without
an optimizer and a checkpointer to load weights; `dsjob.load_model` needs one model.

Whatever draws random numbers is built in a fixed order: models come from `trainer.seed` on every rank, so that they
begin the same; what is built after the engines comes from a seed of the rank's own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.objects import Kept
from dsjob.checkpoint.root.retention import Best, Retention
from dsjob.compute.calls import LossFunction, shifts_labels
from dsjob.contract.models import is_trainable
from dsjob.contract.paths import Path
from dsjob.contract.resolved import ResolvedJob, ResolvedModel
from dsjob.contract.spec import Checkpoint, JobSpec, Target, Trainer
from dsjob.engine.choice import build_job_engine
from dsjob.engine.several import Engines
from dsjob.errors import ContractError, DataError
from dsjob.optim.schedules import settle_length
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World
from dsjob.ranks.mpu import divide
from dsjob.ranks.seeding import seed_rng
from dsjob.training.averaging import Averaging
from dsjob.training.callbacks import Callback
from dsjob.training.evaluation import Evaluator
from dsjob.training.metric_inputs import list_outputs
from dsjob.training.metrics import Measure, Measures, make_measure
from dsjob.training.steps import MicroStep, make_micro_step
from dsjob.trust.grant import Trust
from dsjob.trust.targets import (
    build_callable,
    build_instance,
    build_object,
    call_target,
    placing_section,
    placing_target,
)

T = TypeVar("T")


def build_model(target: Target, trust: Trust, where: Path = ("model",)) -> nn.Module:
    """One model. `where`: its place in the document, for errors.

    Raises ContractError where the target returns something else than a torch.nn.Module, TargetError.
    """
    return build_instance(target, nn.Module, "a torch.nn.Module", trust, where)


def build_models(job: ResolvedJob, trust: Trust) -> dict[str, nn.Module]:
    """The models by name on the CPU, one after the other from one seed; those that are not trained have no gradients.

    Raises as `build_model` does.
    """
    seed_rng(job.spec.trainer.seed)  # the same on every rank: the models have to begin the same
    models = {}
    for name, resolved in job.models.items():
        assert resolved.spec.model is not None
        where = ("models", name, "model") if job.spec.models else ("model",)
        models[name] = build_model(resolved.spec.model, trust, where)
        if not is_trainable(job.document, name):
            models[name].requires_grad_(False)
    return models


def divide_ranks(spec: JobSpec, world: World, trust: Trust) -> World:
    """The world as `trainer.mpu` divides it. A collective with one.

    Raises UsageError, ContractError.
    """
    mpu = call_target(spec.trainer.mpu, trust=trust, where=("trainer", "mpu")) if spec.trainer.mpu else None
    divided, parts = divide(world, mpu), spec.trainer.model_parallel_size
    if divided.model.size != parts:
        raise ContractError(
            f"trainer.mpu says that {divided.model.size} ranks hold one model, and trainer.model_parallel_size {parts}",
            hint=f"trainer.model_parallel_size={divided.model.size}",
        )
    steps = {
        "trainer.step": spec.trainer.step,
        **({"trainer.eval_step": spec.trainer.eval_step} if spec.data.eval else {}),
    }
    missing = [name for name, step in steps.items() if step is None]
    if missing and not all(all_gather(world.everyone, divided.loads)):
        raise ContractError(
            f"trainer.mpu says that some ranks build no loader, and there is no {missing[0]} to do without a batch",
            hint=f"{missing[0]}: {{_target_: my_module.step}} is called with (engines, None) there",
        )
    return divided


def build_engines(
    models: Mapping[str, nn.Module],
    job: ResolvedJob,
    world: World,
    trust: Trust,
    *,
    steps: int | None = None,
) -> Engines:
    """An engine around each model, which moves to the device and is spread over the ranks. A collective.

    `steps`: optimizer steps of the whole run, for the length of schedules; None for engines that do not train, which
    have no optimizer and no schedule and are dsjob's own. Raises UsageError, TargetError.
    """
    engines = {}
    for name, model in models.items():
        with placing_section(job.document, name):
            engines[name] = build_job_engine(model, _settle(job.models[name], steps), world, trust=trust)
    return Engines(engines)


def _settle(model: ResolvedModel, steps: int | None) -> ResolvedModel:
    """The model's job once the length of the run is known; without an optimizer where nothing is trained."""
    spec = model.spec
    if steps is None:
        spec = dataclasses.replace(spec, optimizer=None, scheduler=None, engine="dsjob")
    elif spec.scheduler is not None:
        spec = dataclasses.replace(spec, scheduler=settle_length(spec.scheduler, steps))
    return dataclasses.replace(model, spec=spec)


def count_steps(trainer: Trainer, samples: int | None) -> int:
    """Optimizer steps of a run over a dataset of `samples`, None for a stream. Raises DataError where that is open."""
    limits = []
    if trainer.max_steps is not None:
        limits.append(trainer.max_steps)
    if trainer.max_epochs is not None:
        if samples is None:
            raise DataError("trainer.max_epochs needs a dataset with a length", hint="give trainer.max_steps instead")
        limits.append(math.ceil(trainer.max_epochs * samples / trainer.train_batch))
    return min(limits)


def build_loss(spec: JobSpec, device: torch.device, trust: Trust) -> LossFunction | None:
    """`loss`, on `device` if it is a module; None where the model computes its own. Raises TargetError."""
    return _to_device(build_callable(spec.loss, "loss", trust), device) if spec.loss else None


def _to_device(made: T, device: torch.device) -> T:
    """A loss or metric on the job's device, if it is a module."""
    return made.to(device) if isinstance(made, nn.Module) else made


def build_measures(
    phase: Literal["eval", "train"], spec: JobSpec, world: World, trust: Trust
) -> tuple[Measures, dict[str, Any]]:
    """The metrics of a phase, and the objects that they are made of by name. A collective where there are any.

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


def build_averaging(spec: JobSpec, engines: Engines) -> Averaging:
    """How much each batch counts in a mean: by its targets, or alike."""
    by_targets = spec.trainer.loss_average == "targets" and spec.trainer.step is None
    by_targets = by_targets and engines.first.divides_gradients
    return Averaging(engines.first.world, by_targets=by_targets, shifts=shifts_labels(engines.first.module))


def build_micro_step(spec: JobSpec, loss: LossFunction | None, measures: Measures, trust: Trust) -> MicroStep:
    """What training does with a batch: `trainer.step`, or the model's forward pass and `loss`. Raises TargetError."""
    step = build_callable(spec.trainer.step, "trainer.step", trust) if spec.trainer.step else None
    return make_micro_step(step, loss, measures, _list_taken(spec))


def build_evaluator(
    spec: JobSpec,
    engines: Engines,
    data: Any,
    trust: Trust,
    *,
    collate: Any = None,
    loss: LossFunction | None = None,
    measures: Measures | None = None,
) -> Evaluator:
    """What evaluates `data` (see `build_evaluation_data`) with `trainer.eval_step`, or with the model and `loss`.

    `measures`: the metrics of phase `eval`. Raises TargetError.
    """
    step = build_callable(spec.trainer.eval_step, "trainer.eval_step", trust) if spec.trainer.eval_step else None
    return Evaluator(
        spec,
        engines,
        data,
        collate=collate,
        loss=loss,
        step=step,
        averaging=build_averaging(spec, engines),
        measures=measures if measures is not None else Measures(),
        taken=_list_taken(spec),
    )


def _list_taken(spec: JobSpec) -> set[str]:
    """Names that `trainer.step` and `trainer.eval_step` return for metrics alone."""
    return {name for metric in spec.metrics.values() for name in list_outputs(metric.inputs)}


def build_callbacks(spec: JobSpec, trust: Trust) -> dict[str, Callback]:
    """The job's own callbacks by name. Raises ContractError for one that is no Callback, or has an unknown hook."""
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


def build_checkpointer(job: ResolvedJob, run_dir: str, world: World, objects: Kept | None = None) -> Checkpointer:
    """The checkpoints of a run in the folder `run_dir`, or at `checkpoint.dir`. Nothing is read or written yet.

    `objects`: callbacks, metrics and data whose state checkpoints hold.
    """
    section = job.spec.checkpoint
    return Checkpointer(
        section.dir or storage.join(run_dir, "checkpoints"),
        world=world,
        retention=_build_retention(section),
        job=job.document,
        single_writer=section.single_writer,
        timeout=job.spec.launch.timeout,
        objects=objects,
    )


def _build_retention(section: Checkpoint) -> Retention:
    best = Best(section.best.metric, section.best.mode, section.best.keep) if section.best else None
    return Retention(section.keep, section.keep_every, best)
