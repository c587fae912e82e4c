"""The one place where a spec becomes objects: model, data, engine, checkpoints, callbacks; then the loop."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from dsjob import loop, storage
from dsjob import schema as contract
from dsjob.callbacks import Callback, MetricsFile, RunView
from dsjob.checkpoint.checkpointer import Checkpointer, Loaded
from dsjob.data import TrainingLoader
from dsjob.engine import Engine
from dsjob.entry import build_engine
from dsjob.errors import CheckpointError, ContractError, DataError, NoCheckpointError
from dsjob.mesh import World
from dsjob.optim.changes import apply_changes
from dsjob.optim.schedules import settle_length
from dsjob.precision import name_dtype
from dsjob.progress import Display, make_console, shorten, show_seconds
from dsjob.resolve import complete_config
from dsjob.run_folder import METRICS_NAME, read_result, write_resolved, write_result
from dsjob.seeding import seed_rng
from dsjob.spec import JobSpec, Trainer, view
from dsjob.targets import build_callable, call_target
from dsjob.trust import Trust


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended: the last step, the last training and evaluation metrics, the last checkpoint's folder."""

    step: int
    metrics: dict[str, float]
    checkpoint: str | None


def run_job(document: Mapping[str, Any], run_dir: str, world: World, trust: Trust) -> Result:
    """Runs a resolved job document on this rank. `run_dir`: the run's folder, which exists; `trust`: see `trust`.

    Raises DsjobError for whatever the user can mend; what the user's own code raises passes through.
    """
    spec = view(JobSpec, document)
    console = make_console()
    display = Display(console, shown=world.rank == 0)
    started = time.monotonic()
    try:
        run, loaded = _prepare(spec, document, run_dir, world, display, trust)
        _describe(run, run_dir, loaded, display)
        if run.step >= run.max_steps:
            return _say_complete(run, run_dir, display)
        loop.train(run)
    finally:
        display.close()
    metrics: dict[str, float] = {name: run.last_record[name] for name in ("loss", "lr") if name in run.last_record}
    metrics.update(run.last_evaluation)
    result = Result(step=run.step, metrics=metrics, checkpoint=run.last_saved)
    if world.rank == 0:
        write_result(run_dir, {"status": "done", **dataclasses.asdict(result)})
        display.say("done", f"step {run.step:,} in {show_seconds(time.monotonic() - started)}")
    return result


def _prepare(
    spec: JobSpec, document: Mapping[str, Any], run_dir: str, world: World, display: Display, trust: Trust
) -> tuple[loop.Run, Loaded | None]:
    trainer, build = spec.trainer, functools.partial(call_target, trust=trust)
    seed_rng(trainer.seed)  # the same on every rank: the model has to begin the same
    model = build(spec.model)
    if not isinstance(model, nn.Module):
        raise ContractError(f"model: {spec.model.path} returned {type(model).__name__}, not a torch.nn.Module")
    collate = build_callable(spec.data.collate, "data.collate", trust) if spec.data.collate else None
    loader = TrainingLoader(
        build(spec.data.train),
        micro_batch=trainer.micro_batch,
        world=world,
        seed=trainer.seed,
        shuffle=spec.data.shuffle,
        collate=collate,
        num_workers=spec.data.num_workers,
        pin_memory=spec.data.pin_memory,
    )
    evaluation = build(spec.data.eval) if spec.data.eval else None
    steps = count_steps(trainer, loader.samples_per_epoch)
    schedule = settle_length(spec.scheduler, steps) if spec.scheduler else None
    config = complete_config(document, spec)
    engine = build_engine(model, dataclasses.replace(spec, scheduler=schedule), world, trust=trust, config=config)
    seed_rng(trainer.seed + world.rank)
    url = spec.checkpoint.dir or storage.join(run_dir, "checkpoints")
    checkpointer = Checkpointer(url, world=world, keep=spec.checkpoint.keep, job=document)
    callbacks = [_build_callback(name, target, trust) for name, target in spec.callbacks.items()]
    run = loop.Run(
        spec=spec,
        engine=engine,
        loader=loader,
        max_steps=steps,
        checkpointer=checkpointer,
        callbacks=[
            _WriteResolved(run_dir, document),
            display,
            MetricsFile(os.path.join(run_dir, METRICS_NAME)),
            *callbacks,
        ],
        say=display.say,
        loss=build_callable(spec.loss, "loss", trust) if spec.loss else None,
        evaluation=evaluation,
        collate=collate,
        metrics={name: build_callable(target, f"metrics.{name}", trust) for name, target in spec.metrics.items()},
    )
    return run, _resume(run)


def _build_callback(name: str, target: Any, trust: Trust) -> Callback:
    built = call_target(target, trust=trust)
    if not isinstance(built, Callback):
        raise ContractError(f"callbacks.{name}: {target.path} returned {type(built).__name__}, not a dsjob Callback")
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


def _resume(run: loop.Run) -> Loaded | None:
    """Continues from a checkpoint, as checkpoint.resume says."""
    policy, checkpointer = run.spec.checkpoint.resume, run.checkpointer
    newest = checkpointer.newest()
    if policy == "never":
        if newest is not None:
            raise CheckpointError(
                f"checkpoint.resume is never, but {checkpointer.url} holds checkpoints (the newest is {newest})",
                hint="choose another output.dir or checkpoint.dir, or continue with checkpoint.resume=auto",
            )
        return None
    if newest is None and policy in ("auto", "required"):
        if policy == "required":
            raise NoCheckpointError(
                f"checkpoint.resume is required, but {checkpointer.url} holds no committed checkpoint",
                hint="point checkpoint.dir at one, or start anew with checkpoint.resume=auto",
            )
        return None
    tag = None if policy in ("auto", "required") else policy
    loaded = checkpointer.load(run.engine, tag=tag, seed=run.spec.trainer.seed)
    if loaded.job is not None and run.engine.optimizer is not None:
        # Saved by an earlier version, it may lack sections that have come since.
        before = view(JobSpec, contract.fill_defaults(loaded.job, contract.job_schema()))
        changed = apply_changes(run.engine.optimizer, run.engine.lr_scheduler, before, run.spec)
        if changed:
            run.say("changed", f"since the checkpoint: {', '.join(changed)}")
    if tag is not None and newest is not None and newest != loaded.tag:
        checkpointer.set_aside(newer_than=loaded.step)
    run.last_saved = loaded.url
    return loaded


def _describe(run: loop.Run, run_dir: str, loaded: Loaded | None, display: Display) -> None:
    spec, engine, world = run.spec, run.engine, run.engine.world
    total = sum(weight.numel() for weight in engine.strategy.weights().values())
    trainable = sum(master.numel() for master in engine.strategy.masters.values())
    frozen = f", {shorten(trainable)} trainable" if trainable != total else ""
    trainer, size = spec.trainer, run.loader.samples_per_epoch
    epochs = f", {run.max_steps * trainer.train_batch / size:.3g} epochs" if size else ""
    stage = spec.zero_optimization.stage
    alone = " (one rank: nothing to shard)" if stage and world.world_size == 1 else ""
    given = spec.optimizer.params if spec.optimizer else {}
    rate = f", lr {given['lr']:g}" if isinstance(given.get("lr"), (int, float)) else ""
    schedule = f", {spec.scheduler.label}" if spec.scheduler else ""
    ranks = f"{world.world_size} rank{'s' if world.world_size > 1 else ''}"
    rows = [
        ("model", f"{spec.model.path}, {shorten(total)} parameters{frozen}"),
        ("data", f"{spec.data.train.path}, {f'{size:,} samples' if size else 'a stream'}"),
        (
            "batch",
            f"{trainer.train_batch} = {trainer.micro_batch} micro x {trainer.grad_accum} accumulated x {ranks}",
        ),
        ("steps", f"{run.max_steps:,}{epochs}"),
        ("precision", _describe_precision(engine)),
        ("ZeRO", f"stage {stage}{alone}"),
        ("optimizer", f"{type(engine.optimizer).__name__}{rate}{schedule}, clipping {spec.gradient_clipping:g}"),
        ("device", f"{world.device.type}, {ranks}"),
        ("output", run_dir),
    ]
    if loaded is not None:
        exact = "" if loaded.exact else "; on another world size, so with other random numbers"
        rows.append(("resumed", f"{loaded.url} at step {loaded.step:,}{exact}"))
    display.table(f"dsjob {spec.name}", rows)


def _describe_precision(engine: Engine) -> str:
    scale = f", {'dynamic' if engine.dynamic_loss_scale() else 'static'} loss scale {engine.loss_scale():g}"
    if engine.precision.autocast is not None:
        return f"fp32, autocast to {name_dtype(engine.precision.autocast)}" + scale * engine.precision.needs_scale
    low = engine.precision.name != "fp32"
    return engine.precision.name + ", fp32 masters" * low + scale * engine.precision.needs_scale


def _say_complete(run: loop.Run, run_dir: str, display: Display) -> Result:
    """Nothing is left to train; what the run said of its end before holds on."""
    trainer = run.spec.trainer
    longer = [f"trainer.max_steps={2 * run.step}"] if trainer.max_steps is not None else []
    longer += [f"trainer.max_epochs={2 * trainer.max_epochs:g}"] if trainer.max_epochs is not None else []
    display.say(
        "complete",
        f"step {run.step:,} of {run.max_steps:,} is reached: nothing left to train. "
        f"Train longer with {' '.join(longer)}, or anew in another output.dir.",
    )
    before = read_result(run_dir)
    result = Result(step=run.step, metrics=before.get("metrics", {}), checkpoint=run.last_saved)
    if run.engine.world.rank == 0 and not before:
        write_result(run_dir, {"status": "done", **dataclasses.asdict(result)})
    return result


class _WriteResolved(Callback):
    """Puts resolved.json in its place once training has got somewhere: a run that fails at once leaves the old one."""

    def __init__(self, run_dir: str, document: Mapping[str, Any]) -> None:
        self._run_dir, self._document, self._written = run_dir, document, False

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        if run.engine.world.rank == 0 and not self._written:
            write_resolved(self._run_dir, self._document)
            self._written = True
