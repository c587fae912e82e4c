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
from dsjob.checkpoint.checkpointer import Checkpointer
from dsjob.contract import LossFunction, call_model, find_loss
from dsjob.data import TrainingLoader, iterate_evaluation, to_device
from dsjob.data.batches import count_elements, is_tokens
from dsjob.engine import Engine
from dsjob.errors import ContractError, NonFiniteLossError
from dsjob.spec import JobSpec

Metric = Callable[[Any, Any], Any]


@dataclass
class Run:
    """One training run: what takes part, and how far it is."""

    spec: JobSpec
    engine: Engine
    loader: TrainingLoader
    max_steps: int
    checkpointer: Checkpointer
    callbacks: Sequence[Callback]
    say: Callable[[str, str], None]
    loss: LossFunction | None = None
    evaluation: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    last_record: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    last_saved: str | None = None

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self.engine.global_steps


class _Meter:
    """Losses, samples and seconds since the last record. Losses stay on the device until they are asked for."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.skipped: set[int] = set()  # steps that an overflow of fp16 left out
        self.tokens = 0
        self.seconds = 0.0
        self._started = time.perf_counter()

    def start(self) -> None:
        self._started = time.perf_counter()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._started

    def reset(self) -> None:
        self.losses, self.skipped, self.tokens, self.seconds = [], set(), 0, 0.0


def train(run: Run) -> None:
    """Trains from the engine's step to `run.max_steps`. Raises NonFiniteLossError, ContractError, DataError."""
    engine, trainer, checkpoint = run.engine, run.spec.trainer, run.spec.checkpoint
    run.loader.seek(engine.global_samples)
    batches = iter(run.loader)
    meter = _Meter()
    _tell(run, "on_start")
    if run.evaluation is not None and trainer.eval_at_start and run.step == 0:
        _evaluate(run)
    engine.train()
    meter.start()
    while run.step < run.max_steps:
        meter.losses.append(_take_step(run, batches, meter))
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


def _take_step(run: Run, batches: Iterator[Any], meter: _Meter) -> Tensor:
    """One optimizer step; its loss, the mean over this rank's micro batches."""
    engine = run.engine
    total: Tensor | None = None
    for _ in range(engine.gradient_accumulation_steps()):
        batch = to_device(next(batches), engine.device)
        loss = find_loss(call_model(engine, batch), batch, run.loss)
        scaled = engine.backward(loss).detach()
        engine.step()
        total = scaled if total is None else total + scaled
        meter.tokens += count_elements(batch) if is_tokens(batch) else 0
    assert total is not None
    return total


def _record(run: Run, meter: _Meter) -> None:
    """Collects the losses since the last record from all ranks, makes sure of them, and logs."""
    engine, world = run.engine, run.engine.world
    losses = torch.stack(meter.losses).float()
    if world.world_size > 1:
        dist.all_reduce(losses)
        losses /= world.world_size
    values = dict(enumerate(losses.tolist(), start=run.step - len(losses) + 1))
    # An overflow of fp16 may show in the loss already: the step is left out then, and has done no harm.
    finite = {step: value for step, value in values.items() if step not in meter.skipped or math.isfinite(value)}
    for step, value in finite.items():
        _require_finite(run, "the loss", value, step)
    # Losses show what earlier steps have done to the weights; of the last step only its gradients tell, before a save.
    norm = engine.get_global_grad_norm()
    if run.step not in meter.skipped:
        _require_finite(run, "the gradients' norm", norm, run.step)
    if meter.skipped:
        _tell_skipped(run, meter)
    seconds, steps = max(meter.seconds, 1e-9), len(values)
    per_epoch = run.loader.samples_per_epoch
    run.last_record = {
        "step": run.step,
        "epoch": engine.global_samples / per_epoch if per_epoch else 0.0,
        "loss": sum(finite.values()) / len(finite) if finite else math.nan,
        "lr": engine.last_lr[0],
        "grad_norm": norm,
        "samples_per_second": steps * engine.train_batch_size() / seconds,
        "tokens_per_second": meter.tokens * world.world_size / seconds,
        "eta_seconds": seconds / steps * (run.max_steps - run.step),
    }
    if engine.precision.needs_scale:
        run.last_record["loss_scale"] = engine.loss_scale()
    meter.reset()
    _tell(run, "on_log", run.last_record)


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
    names = ["eval/loss", *(f"eval/{name}" for name in run.metrics)]
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    engine.eval()
    pairs = iterate_evaluation(
        run.evaluation,
        micro_batch=trainer.micro_batch,
        world=engine.world,
        collate=run.collate,
        max_batches=trainer.eval_batches,
    )
    for batch, weight in pairs:
        batch = to_device(batch, engine.device)
        outputs = call_model(engine, batch)
        values = [find_loss(outputs, batch, run.loss)]
        values += [_scalar(name, metric(outputs, batch)) for name, metric in run.metrics.items()]
        if weight:
            sums[:-1] += weight * torch.stack([v.detach().double().cpu() for v in values])
            sums[-1] += weight
    engine.train()
    if engine.world.world_size > 1:
        sums = sums.to(engine.device)
        dist.all_reduce(sums)
    means = (sums[:-1] / sums[-1]).tolist()
    run.last_evaluation = dict(zip(names, means, strict=True))
    if isinstance(engine.lr_scheduler, ReduceLROnPlateau):
        engine.lr_scheduler.step(means[0])
    _tell(run, "on_eval", run.last_evaluation)


def _scalar(name: str, value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if tensor.numel() != 1:
        raise ContractError(
            f"metrics.{name} returned a tensor of shape {list(tensor.shape)}", hint="return the batch mean"
        )
    return tensor.reshape(())


def _save(run: Run) -> None:
    saved = run.checkpointer.save(run.engine, tag=f"step-{run.step:08d}")
    run.last_saved = saved.url
    _tell(run, "on_save", saved.url)


def _tell(run: Run, hook: str, *arguments: Any) -> None:
    for callback in run.callbacks:
        getattr(callback, hook)(run, *arguments)
