"""Evaluation: the whole of data.eval through the model, on all ranks, and what that gives by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dsjob.checkpoint.live.rng import capture_rng, restore_rng
from dsjob.compute.calls import call_model, find_loss
from dsjob.data import EvaluationBatches, LoaderEvaluation, to_device
from dsjob.data.given import EvaluationPass
from dsjob.data.loader import choose_loading
from dsjob.errors import ContractError, MetricError
from dsjob.ranks.mpu import share, share_length
from dsjob.ranks.watchdog import position
from dsjob.training.run import Run
from dsjob.training.steps import Names, read_scalars

_EVALUATED = "batches of data.eval"


def evaluate(run: Run) -> None:
    """One evaluation, over all ranks: `run.last_evaluation`, the callbacks, and schedules that follow the loss."""
    means = _measure(run)
    run.last_evaluation = {**means, **run.measures.finish()}
    for each in run.engines.values():
        if isinstance(each.lr_scheduler, ReduceLROnPlateau):
            each.lr_scheduler.step(means["eval/loss"])
    run.evaluated_at = run.step
    run.tell("on_eval", run.last_evaluation)


def rehearse(run: Run) -> None:
    """Evaluates one batch and forgets it, so that a mistake in what is evaluated with shows before the first step.

    Random generators, buffers and metrics are then as before. Data that can be read once are left alone. Raises what an
    evaluation would; ContractError.
    """
    engine = run.engine
    if share(int(isinstance(run.evaluation, Iterator)), engine.world):
        return
    random = capture_rng(engine.device)
    buffers = [buffer for each in run.engines.values() for buffer in each.module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    trainer = dataclasses.replace(run.spec.trainer, eval_batches=1)
    measures = run.measures.copy()
    found = _measure(dataclasses.replace(run, spec=dataclasses.replace(run.spec, trainer=trainer), measures=measures))
    try:
        results = {**found, **measures.finish()}
        if len(measures) == len(run.measures):  # else it may be of a metric that cannot be copied
            _require_best(run, results)
    except MetricError as error:  # one batch may be too little for it: one class alone, for example
        run.say("note", f"{error.message}: on one batch of data.eval; the whole of it may be enough")
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    restore_rng(random, engine.device)


def _require_best(run: Run, results: Mapping[str, float]) -> None:
    best = run.spec.checkpoint.best
    if best is not None and best.metric not in results:
        raise ContractError(
            f"checkpoint.best.metric is {best.metric}, but evaluation produces no such metric",
            hint=f"available: {', '.join(sorted(results))}",
        )


@torch.no_grad()
def _measure(run: Run) -> dict[str, float]:
    """Means over data.eval by name; `run.measures` have seen all of it."""
    engine = run.engine
    run.engines.eval()
    run.measures.start()
    same = Names("trainer.eval_step")
    sums: dict[str, Tensor] = {}  # by name what values add up to, and their weights
    for batch, samples in _read_evaluation(run):
        position.micro_steps += 1
        values = _evaluate_batch(run, batch, samples)
        if run.eval_step is not None:
            scalars = same.require({name: value for name, (value, _) in values.items()}, engine.world)
            values = {name: (value, samples) for name, value in scalars.items()}
        counts = samples and engine.world.reports
        for name, (value, weight) in values.items():
            added = _pair(value, weight, engine.device) if counts else _pair(0, 0, engine.device)
            sums[name] = sums[name] + added if name in sums else added
    run.engines.train()
    names, together = list(sums), torch.stack(list(sums.values()))
    if engine.world.everyone.world_size > 1:
        dist.all_reduce(together)
    means = (together[:, 0] / together[:, 1]).tolist()
    follows = any(isinstance(each.lr_scheduler, ReduceLROnPlateau) for each in run.engines.values())
    if follows and "loss" not in names:
        raise ContractError("trainer.eval_step returned no `loss`, which ReduceLROnPlateau follows")
    return dict(zip((f"eval/{name}" for name in names), means, strict=True))


def _read_evaluation(run: Run) -> Iterator[tuple[Any, int]]:
    """This rank's evaluation batches with their weights; None, with those of its model, where it reads no data."""
    world = run.engine.world
    if not world.loads:
        for _ in range(share_length(0, world, _EVALUATED)):
            yield None, share(0, world)
        return
    pairs = _start_pass(run)
    share_length(len(pairs), world, _EVALUATED)
    for batch, weight in pairs:
        yield batch, share(weight, world)


def _start_pass(run: Run) -> EvaluationBatches | EvaluationPass:
    trainer = run.spec.trainer
    if isinstance(run.evaluation, LoaderEvaluation):
        return run.evaluation.limit(trainer.eval_batches)
    return EvaluationBatches(
        run.evaluation,
        micro_batch=trainer.micro_batch,
        world=run.engine.world,
        collate=run.collate,
        max_batches=trainer.eval_batches,
        **choose_loading(run.spec.data, run.evaluation, run.engine.world),
    )


def _pair(value: Tensor | float, weight: Tensor | float, device: torch.device) -> Tensor:
    """value x weight, and the weight: float64 [2]. What has no weight adds nothing, even if it is not a number."""
    value, weight = (
        part.detach().to(device, torch.float64)
        if isinstance(part, Tensor)
        else torch.full((), part, dtype=torch.float64, device=device)
        for part in (value, weight)
    )
    return torch.stack([torch.where(weight == 0, 0.0, value * weight), weight])


def _evaluate_batch(run: Run, host_batch: Any, samples: int) -> dict[str, tuple[Tensor, Tensor | float]]:
    """What a batch gives by name: means, each with its weight."""
    batch = to_device(host_batch, run.engine.device)
    if run.eval_step is not None:
        given = run.eval_step(run.engines, batch)
        if not run.engine.world.reports:
            return {}
        scalars = read_scalars(given, "trainer.eval_step", run.taken)
        if samples:
            run.measures.feed(given, batch, None, samples)
        return {name: (scalars[name], samples) for name in sorted(scalars)}
    outputs = call_model(run.engine, batch)
    loss = find_loss(outputs, batch, run.loss)
    if samples:
        run.measures.feed(outputs, batch, loss.mean, samples)
    return {"loss": (loss.mean, run.averaging.measure(loss, host_batch, samples))}
