"""The loop: batches through the engine until the last step, with logs, evaluations and checkpoints on their way.

It stays out of the way: nothing waits for the device between log records, where losses are collected for all steps
since the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dsjob.callbacks import Callback
from dsjob.checkpoint.checkpointer import Checkpointer, Savable
from dsjob.contract import LossFunction, call_model, find_loss
from dsjob.data import TrainingLoader, iterate_evaluation, to_device
from dsjob.data.batches import count_elements, is_tokens
from dsjob.engine import Engine
from dsjob.engines import Engines
from dsjob.errors import ContractError, NonFiniteLossError
from dsjob.spec import JobSpec
from dsjob.steps import MicroStep, UserStep, read_scalars

Metric = Callable[[Any, Any], Any]


@dataclass
class Run:
    """One training run: what takes part, and how far it is."""

    spec: JobSpec
    engines: Engines
    loader: TrainingLoader
    max_steps: int
    checkpointer: Checkpointer
    callbacks: Sequence[Callback]
    say: Callable[[str, str], None]
    micro_step: MicroStep
    loss: LossFunction | None = None
    evaluation: Any = None
    eval_step: UserStep | None = None
    collate: Callable[[list[Any]], Any] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    last_record: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    last_saved: str | None = None

    @property
    def engine(self) -> Engine:
        """The engine that counts steps and samples."""
        return self.engines.first

    @property
    def savable(self) -> Savable:
        """What checkpoints hold: the one engine by itself, or all by name."""
        return self.engines if self.spec.models else self.engine

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self.engine.global_steps


class _Meter:
    """Scalars, samples and seconds since the last record. Scalars stay on the device until they are asked for."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[Tensor]] = {}  # by name, one of each step; `loss` first
        self.skipped: set[int] = set()  # steps that an overflow of fp16 left out
        self.tokens = 0
        self.seconds = 0.0
        self._started = time.perf_counter()

    def start(self) -> None:
        self._started = time.perf_counter()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._started

    def reset(self) -> None:
        self.scalars, self.skipped, self.tokens, self.seconds = {}, set(), 0, 0.0


def train(run: Run) -> None:
    """Trains from the engine's step to `run.max_steps`. Raises NonFiniteLossError, ContractError, DataError."""
    engine, trainer, checkpoint = run.engine, run.spec.trainer, run.spec.checkpoint
    run.loader.seek(engine.global_samples)
    batches = iter(run.loader)
    meter = _Meter()
    _tell(run, "on_start")
    if run.evaluation is not None and trainer.eval_at_start and run.step == 0:
        _evaluate(run)
    run.engines.train()
    meter.start()
    while run.step < run.max_steps:
        _take_step(run, batches, meter)
        if not engine.was_step_applied():
            meter.skipped.add(run.step)
        last = run.step == run.max_steps
        logs = last or run.step % trainer.log_every == 0
        evaluates = run.evaluation is not None and (last or (trainer.eval_every and run.step % trainer.eval_every == 0))
        saves = (last and checkpoint.at_end) or (checkpoint.every and run.step % checkpoint.every == 0)
        if not (logs or evaluates or saves):
            continue
        meter.pause()
        _record(run, meter)
        if evaluates:
            _evaluate(run)
        if saves:
            _save(run)
        meter.start()
    _tell(run, "on_end")


def _take_step(run: Run, batches: Iterator[Any], meter: _Meter) -> None:
    """One optimizer step; the meter gets its scalars, the means over this rank's micro batches."""
    engine, before = run.engine, run.step
    micro_steps = engine.gradient_accumulation_steps()
    sums: dict[str, Tensor] = {}
    for _ in range(micro_steps):
        batch = to_device(next(batches), engine.device)
        for name, value in run.micro_step(run.engines, batch).items():
            sums[name] = sums[name] + value if name in sums else value
        meter.tokens += count_elements(batch) if is_tokens(batch) else 0
    if run.step == before:
        raise ContractError(
            f"trainer.step was called {micro_steps} times, and the first model took no step",
            hint="call engine.backward(loss) and engine.step() of each engine in every call",
        )
    for name, total in sums.items():
        meter.scalars.setdefault(name, []).append(total / micro_steps if micro_steps > 1 else total)


def _record(run: Run, meter: _Meter) -> None:
    """Collects the scalars since the last record from all ranks, makes sure of them, and logs."""
    engine, world = run.engine, run.engine.world
    scalars = torch.cat([torch.stack(values).float() for values in meter.scalars.values()])
    if world.world_size > 1:
        dist.all_reduce(scalars)
        scalars /= world.world_size
    losses, *others = torch.split(scalars, [len(values) for values in meter.scalars.values()])
    means = {name: float(values.mean()) for name, values in zip(list(meter.scalars)[1:], others, strict=True)}
    steps = len(losses)
    finite = _require_finite_losses(run, meter, losses.tolist())
    norm = engine.get_global_grad_norm()
    if meter.skipped:
        _tell_skipped(run, meter)
    seconds = max(meter.seconds, 1e-9)
    per_epoch = run.loader.samples_per_epoch
    own = {
        "step": run.step,
        "epoch": engine.global_samples / per_epoch if per_epoch else 0.0,
        "loss": sum(finite) / len(finite) if finite else math.nan,
        "lr": engine.last_lr[0],
        "grad_norm": norm,
        "samples_per_second": steps * engine.train_batch_size() / seconds,
        "tokens_per_second": meter.tokens * world.world_size / seconds,
        "eta_seconds": seconds / steps * (run.max_steps - run.step),
    }
    if engine.precision.needs_scale:
        own["loss_scale"] = engine.loss_scale()
    run.last_record = {**own, **{name: mean for name, mean in means.items() if name not in own}}
    meter.reset()
    _tell(run, "on_log", run.last_record)


def _require_finite_losses(run: Run, meter: _Meter, losses: list[float]) -> list[float]:
    """The losses of the steps that were taken. Raises NonFiniteLossError.

    An overflow of fp16 may show in the loss already: the step is left out then, and has done no harm.
    """
    steps = dict(enumerate(losses, start=run.step - len(losses) + 1))
    kept = {step: value for step, value in steps.items() if step not in meter.skipped or math.isfinite(value)}
    for step, value in kept.items():
        _require_finite(run, "the loss", value, step)
    # Losses show what earlier steps have done to the weights; of the last step only its gradients tell, before a save.
    for name, engine in run.engines.items():
        if engine.was_step_applied():
            of = f" of {name}" if len(run.engines) > 1 else ""
            _require_finite(run, f"the gradients' norm{of}", engine.get_global_grad_norm(), run.step)
    return list(kept.values())


def _tell_skipped(run: Run, meter: _Meter) -> None:
    count, scale = len(meter.skipped), run.engine.loss_scale()
    steps = f"{count} step{'s' if count > 1 else ''}, the last one {max(meter.skipped)}"
    run.say("skipped", f"{steps}: gradients overflowed fp16; the loss scale is {scale:g} now")


def _require_finite(run: Run, what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        good = f"the last good checkpoint is {run.last_saved}" if run.last_saved else "there is no checkpoint yet"
        raise NonFiniteLossError(
            f"{what} became {value} in step {step}; {good}",
            hint="lower optimizer.params.lr, lengthen the warm-up, lower gradient_clipping, or look at that batch",
        )


@torch.no_grad()
def _evaluate(run: Run) -> None:
    engine, trainer = run.engine, run.spec.trainer
    run.engines.eval()
    pairs = iterate_evaluation(
        run.evaluation,
        micro_batch=trainer.micro_batch,
        world=engine.world,
        collate=run.collate,
        max_batches=trainer.eval_batches,
    )
    names: list[str] = []
    sums = torch.zeros(0, dtype=torch.float64)  # the names' values, and the samples
    for batch, weight in pairs:
        values = _evaluate_batch(run, to_device(batch, engine.device))
        if not names:
            names, sums = list(values), torch.zeros(len(values) + 1, dtype=torch.float64)
        if weight:
            sums[:-1] += weight * torch.stack([values[name].detach().double().cpu() for name in names])
            sums[-1] += weight
    run.engines.train()
    if engine.world.world_size > 1:
        sums = sums.to(engine.device)
        dist.all_reduce(sums)
    means = (sums[:-1] / sums[-1]).tolist()
    run.last_evaluation = dict(zip((f"eval/{name}" for name in names), means, strict=True))
    for each in run.engines.values():
        if isinstance(each.lr_scheduler, ReduceLROnPlateau):
            each.lr_scheduler.step(means[0])
    _tell(run, "on_eval", run.last_evaluation)


def _evaluate_batch(run: Run, batch: Any) -> dict[str, Tensor]:
    if run.eval_step is not None:
        return read_scalars(run.eval_step(run.engines, batch), "trainer.eval_step")
    outputs = call_model(run.engine, batch)
    metrics = {name: _scalar(name, metric(outputs, batch)) for name, metric in run.metrics.items()}
    return {"loss": find_loss(outputs, batch, run.loss), **metrics}


def _scalar(name: str, value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if tensor.numel() != 1:
        raise ContractError(
            f"metrics.{name} returned a tensor of shape {list(tensor.shape)}", hint="return the batch mean"
        )
    return tensor.reshape(())


def _save(run: Run) -> None:
    saved = run.checkpointer.save(run.savable, tag=f"step-{run.step:08d}")
    run.last_saved = saved.url
    _tell(run, "on_save", saved.url)


def _tell(run: Run, hook: str, *arguments: Any) -> None:
    for callback in run.callbacks:
        getattr(callback, hook)(run, *arguments)
