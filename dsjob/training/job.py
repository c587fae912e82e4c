"""The one place where a spec becomes objects: model, data, engine, checkpoints, callbacks; then the loop."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.committed import Loaded
from dsjob.checkpoint.live.objects import Kept
from dsjob.checkpoint.pretrained.configuration import describe_pretrained
from dsjob.checkpoint.root.retention import Best, Retention
from dsjob.compute.calls import LossFunction, shifts_labels
from dsjob.compute.precision import matmul_precision
from dsjob.contract import locations
from dsjob.contract.models import is_trainable
from dsjob.contract.resolved import ResolvedJob, ResolvedModel
from dsjob.contract.spec import Checkpoint, JobSpec, Trainer
from dsjob.data import NoLoader
from dsjob.data.given import StatefulLoader
from dsjob.engine.build import build_engine
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.errors import ContractError, DataError
from dsjob.optim.schedules import settle_length
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World
from dsjob.ranks.mpu import divide
from dsjob.ranks.seeding import seed_rng
from dsjob.run_folder import SAVE_REQUEST, read_result, write_resolved, write_result
from dsjob.training import loop
from dsjob.training.advice import train_longer
from dsjob.training.averaging import Averaging
from dsjob.training.callbacks import Callback, MetricsFile, RunView
from dsjob.training.display import Display, make_console, show_seconds
from dsjob.training.evaluation import Evaluator
from dsjob.training.loaders import build_evaluation, build_training, share_samples
from dsjob.training.metric_inputs import list_outputs
from dsjob.training.metrics import Measures, build_measures, to_job_device
from dsjob.training.occasions import Occasions
from dsjob.training.resume import resume
from dsjob.training.run import Run
from dsjob.training.saves import lacks_metrics
from dsjob.training.steps import MicroStep, UserStep, make_micro_step
from dsjob.training.summary import describe_run
from dsjob.trust.exits import refuse_exits
from dsjob.trust.grant import Trust
from dsjob.trust.targets import build_callable, call_target


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended: the last step, the passes over the data that it took (None: a stream), the last training and
    evaluation metrics, the last checkpoint's folder, and whether it is one of a single model of transformers."""

    step: int
    epochs: float | None
    metrics: dict[str, float]
    checkpoint: str | None
    pretrained: bool


def run_job(job: ResolvedJob, run_dir: str, world: World, trust: Trust) -> Result:
    """Runs a resolved job on this rank. `run_dir`: the run's folder, which exists; `trust`: see `trust`.

    Raises DsjobError for whatever the user can mend; what the user's own code raises passes through, but for an end of
    the process, which is an ExitError.
    """
    locations.allow(lambda: trust.protocols)
    spec = job.spec
    console = make_console()
    display = Display(console, shown=world.everyone.rank == 0)
    started = time.monotonic()
    try:
        with refuse_exits(), matmul_precision(spec.trainer.matmul_precision):
            run, loaded = _prepare(job, run_dir, world, display, trust)
            display.table(f"dsjob {spec.name}", describe_run(run, run_dir, loaded))
            if run.step >= run.max_steps:
                if run.evaluator is not None and lacks_metrics(run):
                    loop.finish(run)
                return _say_complete(run, run_dir, display)
            loop.train(run)
    finally:
        display.close()
    progress = run.progress
    metrics: dict[str, float] = {
        name: progress.last_record[name] for name in ("loss", "lr") if name in progress.last_record
    }
    result = _make_result(run, {**metrics, **progress.last_evaluation})
    if world.everyone.rank == 0:
        ended = {"status": "unsaved", "error": progress.unsaved} if progress.unsaved else {"status": "done"}
        write_result(run_dir, {**ended, **dataclasses.asdict(result)})
        display.say(ended["status"], f"step {run.step:,} in {show_seconds(time.monotonic() - started)}")
    return result


def _make_result(run: Run, metrics: dict[str, float]) -> Result:
    engines = list(run.engines.values())
    return Result(
        step=run.step,
        epochs=_count_epochs(run),
        metrics=metrics,
        checkpoint=run.progress.last_saved,
        pretrained=len(engines) == 1 and bool(describe_pretrained(engines[0].module)),
    )


def _count_epochs(run: Run) -> float | None:
    samples = run.loader.samples_per_epoch
    return run.step * run.spec.trainer.train_batch / samples if samples else None


def _prepare(job: ResolvedJob, run_dir: str, world: World, display: Display, trust: Trust) -> tuple[Run, Loaded | None]:
    spec = job.spec
    trainer, build = spec.trainer, functools.partial(call_target, trust=trust)
    mpu = build(trainer.mpu, where=("trainer", "mpu")) if trainer.mpu else None
    world = _divide(spec, world, mpu)
    models = _build_models(job, trust)
    collate = build_callable(spec.data.collate, "data.collate", trust) if spec.data.collate else None
    loader = build_training(spec, world, collate, trust) if world.loads else NoLoader()
    share_samples(loader, world)
    evaluation_data = build_evaluation(spec, world, collate, trust) if spec.data.eval and world.loads else None
    steps = count_steps(trainer, loader.samples_per_epoch)
    engines = _build_engines(models, job, steps, world, trust, mpu)
    seed_rng(trainer.seed + world.data_rank)
    loss = to_job_device(build_callable(spec.loss, "loss", trust), world.device) if spec.loss else None
    callbacks = {name: _build_callback(name, target, trust) for name, target in spec.callbacks.items()}
    measures, metrics = build_measures("eval", spec.metrics, world, trust)
    training_measures, training_metrics = build_measures("train", spec.metrics, world, trust)
    taken = {name for metric in spec.metrics.values() for name in list_outputs(metric.inputs)}
    stateful = {"train": loader} if isinstance(loader, StatefulLoader) else {}
    kept = Kept(display.say, callbacks=callbacks, metrics=metrics, training_metrics=training_metrics, data=stateful)
    checkpointer = Checkpointer(
        spec.checkpoint.dir or storage.join(run_dir, "checkpoints"),
        world=world,
        retention=_build_retention(spec.checkpoint),
        job=job.document,
        single_writer=spec.checkpoint.single_writer,
        timeout=spec.launch.timeout,
        objects=kept,
    )
    micro_step, eval_step = _build_steps(spec, loss, training_measures, taken, trust)
    averaging = _build_averaging(spec, engines.first)
    evaluator = Evaluator(
        spec,
        engines,
        evaluation_data,
        collate,
        loss,
        step=eval_step,
        averaging=averaging,
        measures=measures,
        taken=taken,
    )
    run = Run(
        spec=spec,
        engines=engines,
        loader=loader,
        max_steps=steps,
        checkpointer=checkpointer,
        occasions=Occasions(spec.checkpoint, world, os.path.join(run_dir, SAVE_REQUEST), grace=spec.launch.grace),
        callbacks=[_WriteResolved(run_dir, job.document), display, MetricsFile(run_dir), *callbacks.values()],
        say=display.say,
        micro_step=micro_step,
        averaging=averaging,
        measures=training_measures,
        evaluator=evaluator if spec.data.eval else None,
        kept=kept,
    )
    return run, resume(run, job)


def _build_steps(
    spec: JobSpec, loss: LossFunction | None, measures: Measures, taken: Collection[str], trust: Trust
) -> tuple[MicroStep, UserStep | None]:
    step, eval_step = (
        build_callable(target, f"trainer.{name}", trust) if target else None
        for name, target in (("step", spec.trainer.step), ("eval_step", spec.trainer.eval_step))
    )
    return make_micro_step(step, loss, measures, taken), eval_step


def _build_averaging(spec: JobSpec, engine: Engine) -> Averaging:
    by_targets = spec.trainer.loss_average == "targets" and spec.engine == "dsjob" and spec.trainer.step is None
    return Averaging(engine.world, by_targets=by_targets, shifts=shifts_labels(engine.module))


def _build_retention(spec: Checkpoint) -> Retention:
    best = Best(spec.best.metric, spec.best.mode, spec.best.keep) if spec.best else None
    return Retention(spec.keep, spec.keep_every, best)


def _divide(spec: JobSpec, world: World, mpu: Any) -> World:
    """The world as trainer.mpu divides it. Raises UsageError, ContractError."""
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


def _build_models(job: ResolvedJob, trust: Trust) -> dict[str, nn.Module]:
    """The models, made one after the other from one seed."""
    seed_rng(job.spec.trainer.seed)  # the same on every rank: the models have to begin the same
    models = {}
    for name, resolved in job.models.items():
        target = resolved.spec.model
        assert target is not None
        where = ("models", name, "model") if job.spec.models else ("model",)
        model = call_target(target, trust=trust, where=where)
        if not isinstance(model, nn.Module):
            called = f"models.{name}" if job.spec.models else "model"
            raise ContractError(f"{called}: {target.path} returned {type(model).__name__}, not a torch.nn.Module")
        if not is_trainable(job.document, name):
            model.requires_grad_(False)
        models[name] = model
    return models


def _build_engines(
    models: Mapping[str, nn.Module], job: ResolvedJob, steps: int, world: World, trust: Trust, mpu: Any
) -> Engines:
    return Engines(
        {name: _build_engine(model, job.models[name], steps, world, trust, mpu) for name, model in models.items()}
    )


def _build_engine(
    model: nn.Module, resolved: ResolvedModel, steps: int, world: World, trust: Trust, mpu: Any
) -> Engine:
    spec, config = resolved.spec, resolved.config
    if spec.scheduler is not None:
        spec = dataclasses.replace(spec, scheduler=settle_length(spec.scheduler, steps))
    if spec.engine == "dsjob":
        return build_engine(model, spec, world, trust=trust, config=config, mpu=mpu)
    from dsjob.engine import driven

    return driven.build_engine(model, spec, world, trust=trust, config=config, document=resolved.sections)


def _build_callback(name: str, target: Any, trust: Trust) -> Callback:
    built = call_target(target, trust=trust, where=("callbacks", name))
    if not isinstance(built, Callback):
        raise ContractError(f"callbacks.{name}: {target.path} returned {type(built).__name__}, not a dsjob Callback")
    hooks = [hook for hook in vars(Callback) if hook.startswith("on_")]
    for hook in dir(type(built)):
        if hook.startswith("on_") and hook not in hooks and callable(getattr(type(built), hook)):
            raise ContractError(
                f"callbacks.{name}: {target.path} has {hook}, which is never called", hint=f"hooks: {', '.join(hooks)}"
            )
    return built


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


def _say_complete(run: Run, run_dir: str, display: Display) -> Result:
    """Nothing is left to train; what the run said of its end before holds on, but for a later evaluation."""
    trainer = run.spec.trainer
    longer = train_longer(trainer.max_steps, trainer.max_epochs, step=run.step, epochs=_count_epochs(run))
    beyond = f"{run.step:,} steps are done, and this run is to have {run.max_steps:,}"
    display.say(
        "complete",
        f"already finished: {beyond if run.step > run.max_steps else f'step {run.step:,} of {run.max_steps:,}'}. "
        f"Train longer with {longer}, or anew in another output.dir.",
    )
    before = read_result(run_dir)
    result = _make_result(run, {**before.get("metrics", {}), **run.progress.last_evaluation})
    if run.engine.global_rank == 0 and (not before or run.progress.last_evaluation):
        write_result(run_dir, {"status": "done", **dataclasses.asdict(result)})
    return result


class _WriteResolved(Callback):
    """Puts resolved.json in its place once training has got somewhere: a run that fails at once leaves the old one."""

    def __init__(self, run_dir: str, document: Mapping[str, Any]) -> None:
        self._run_dir, self._document, self._written = run_dir, document, False

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        if run.engine.global_rank == 0 and not self._written:
            write_resolved(self._run_dir, self._document)
            self._written = True
