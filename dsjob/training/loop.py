"""The loop: batches through the engine until the last step, with logs, evaluations and checkpoints on their way.

It stays out of the way: nothing waits for the device between log records, where losses are collected for all steps
since the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.checkpoint.live.objects import capture_objects
from dsjob.checkpoint.live.rng import capture_rng, restore_rng
from dsjob.data import to_device
from dsjob.data.batches import count_elements, is_tokens
from dsjob.errors import ContractError, NonFiniteLossError
from dsjob.ranks import patience
from dsjob.ranks.watchdog import position
from dsjob.training.evaluation import evaluate, rehearse
from dsjob.training.occasions import Occasions
from dsjob.training.run import Run
from dsjob.training.saves import describe_end, ends_period, is_among_best, lacks_metrics, rate, save, settle
from dsjob.training.steps import Names


class _Meter:
    """Scalars, tokens and seconds of training since the last record; and what else has taken time in the run: records,
    evaluations, saves, callbacks. Scalars stay on the device until they are asked for."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[Tensor]] = {}  # by name, one of each step; `loss` first
        self.skipped: dict[str, set[int]] = {}  # by engine, steps that were left out
        self.skips: dict[str, int] = {}  # by engine, how many steps it is known to have left out
        self.tokens = 0
        self.seconds = 0.0
        self.names = Names("trainer.step")
        self._steps, self._beside = 0, 0.0  # of the whole run
        self._turned = time.perf_counter()

    def start(self) -> None:
        """Training goes on."""
        self._beside += self._turn()

    def pause(self) -> None:
        """Something else begins."""
        self.seconds += self._turn()

    def _turn(self) -> float:
        before, self._turned = self._turned, time.perf_counter()
        return self._turned - before

    def estimate(self, steps: int, left: int) -> float:
        """Seconds of the clock for `left` more steps: as fast as the `steps` since the last record, and with the
        share of all else that each step has had so far."""
        self._steps += steps
        return (self.seconds / steps + self._beside / self._steps) * left

    def reset(self) -> None:
        self.scalars, self.skipped, self.tokens, self.seconds = {}, {}, 0, 0.0


def train(run: Run) -> None:
    """Trains from the engine's step to `run.max_steps`.

    Raises NonFiniteLossError, ContractError, DataError, CheckpointError, StorageError; Preempted where
    SIGTERM came, Interrupted where Ctrl-C did.
    """
    occasions = run.occasions or Occasions(run.spec.checkpoint, run.engine.world, None)
    position.settle = run.checkpointer.give_up
    with occasions.watch(run.step):
        try:
            _train(run, occasions)
        except KeyboardInterrupt:  # the user has asked twice
            raise
        except BaseException:
            position.doing = "ending"
            run.checkpointer.give_up(patience.TO_SETTLE)
            raise
    position.doing = "finishing"  # with nothing more that other ranks take part in
    run.tell("on_end")


def finish(run: Run) -> None:
    """Makes up for the last evaluation, where an earlier run had saved its last step and then failed in it."""
    run.tell("on_start")
    _make_up(run)
    position.doing = "finishing"
    run.tell("on_end")


def _make_up(run: Run) -> None:
    evaluate(run)
    save(run, wait=True, replace=True)


def _evaluates_after(run: Run) -> bool:
    """Whether an evaluation is due after this step."""
    every, last = run.spec.trainer.eval_every, run.step == run.max_steps
    return run.evaluates and (last or bool(every and run.step % every == 0))


def _train(run: Run, occasions: Occasions) -> None:
    engine, trainer, checkpoint = run.engine, run.spec.trainer, run.spec.checkpoint
    run.loader.seek(engine.global_samples)
    batches = iter(run.loader)
    random = capture_rng(engine.device)
    run.tell("on_start")
    if run.step:  # the run without interruption was told once, before its first step
        restore_rng(random, engine.device)
    capture_objects(engine.world.everyone, run.kept)  # state that cannot be saved is told of before it costs anything
    if run.evaluates and trainer.eval_at_start and run.step == 0:
        evaluate(run)
    elif run.step and _evaluates_after(run) and lacks_metrics(run):  # the run ended between the two
        _make_up(run)
    elif run.evaluates:
        rehearse(run)
    run.engines.train()
    run.training_measures.start()
    meter = _Meter()
    position.doing = "training"
    while run.step < run.max_steps:
        seen = engine.global_samples
        _take_step(run, batches, meter)
        position.step = run.step
        last = run.step == run.max_steps
        agreed = occasions.agree(run.step, news=run.checkpointer.has_news)
        if agreed.news:
            occasions.note_settled(settle(run))
        logs = last or run.step % trainer.log_every == 0
        # Whoever has asked the run to end waits for no evaluation: the next run makes up for it.
        evaluates = _evaluates_after(run) and (last or not agreed.stops)
        saves = (last and checkpoint.at_end) or (checkpoint.every and run.step % checkpoint.every == 0)
        saves = bool(saves or agreed.saves or agreed.stops or ends_period(run, seen))
        if not (logs or evaluates or saves):
            continue
        _record(run, meter)
        wait = last or agreed.stops > 0
        early = evaluates and saves  # an evaluation that fails, or lasts, must not lose the step
        position.doing = "saving"
        saved = early and save(run, wait=wait)
        if evaluates:
            position.doing = "evaluating"
            evaluate(run)
            saves = saves or is_among_best(run)
            position.doing = "saving"
        if saves and not (saved and rate(run)):
            saved = save(run, wait=wait, replace=early)
        if saves:
            occasions.note_save(behind=checkpoint.async_ and not wait) if saved else occasions.note_failure()
            if agreed.stops and not last:
                raise describe_end(run, agreed.stops, saved=saved)
        position.doing = "training"
        meter.start()
    settle(run)


def _take_step(run: Run, batches: Iterator[Any], meter: _Meter) -> None:
    """One optimizer step; the meter gets its scalars, the means over this rank's micro batches."""
    engine, before = run.engine, run.step
    micro_steps = engine.gradient_accumulation_steps()
    sums: dict[str, Tensor] = {}
    for given, part in run.averaging.read(batches, micro_steps):
        batch = to_device(given, engine.device)
        position.micro_steps += 1
        scalars = run.micro_step(run.engines, batch, part)
        if run.spec.trainer.step is not None:
            scalars = meter.names.require(scalars, engine.world)
        for name, value in scalars.items():
            sums[name] = sums[name] + value if name in sums else value
        meter.tokens += count_elements(batch) if is_tokens(batch) else 0
    if run.spec.trainer.step is not None:
        _require_step(run, before, micro_steps)
    _note_skipped(run, meter)
    for name, total in sums.items():
        mean = total / micro_steps if micro_steps > 1 else total
        meter.scalars.setdefault(name, []).append(part.step.finish(mean) if name == "loss" else mean)


def _note_skipped(run: Run, meter: _Meter) -> None:
    """Notes steps that engines have left out; of the last one they may not know yet."""
    for name, each in run.engines.items():
        rhythm = each.rhythm
        if rhythm.skipped_steps > meter.skips.get(name, 0):
            meter.skipped.setdefault(name, set()).add(run.step - (rhythm.global_steps - rhythm.last_skipped))
        meter.skips[name] = rhythm.skipped_steps


def _require_step(run: Run, before: int, micro_steps: int) -> None:
    """Raises ContractError where trainer.step has not made one step of the first engine, and whole ones of the rest."""
    advice = "call engine.backward(loss) and engine.step() of each engine in every call"
    if run.step != before + 1:
        first, steps = next(iter(run.engines)), run.step - before
        raise ContractError(
            f"trainer.step was called {micro_steps} times, and the first model, {first}, took {steps} steps, not 1",
            hint="list first the model that steps once per call" if steps > 1 else advice,
        )
    for name, engine in run.engines.items():
        if engine.rhythm.done:
            raise ContractError(
                f"{name} is in the midst of accumulating gradients as a step of the first model ends, where checkpoints"
                " are made, which hold none",
                hint=advice,
            )


def _record(run: Run, meter: _Meter) -> None:
    """Collects the scalars since the last record from all ranks, makes sure of them, and logs."""
    engine, world = run.engine, run.engine.world
    if run.loader.samples_per_epoch is None:
        run.loader.passes.require_same(world, loads=world.loads)
    scalars = torch.cat([torch.stack(values).float().to(engine.device) for values in meter.scalars.values()])
    tokens = float(meter.tokens)
    if world.everyone.world_size > 1:
        reported = torch.cat([scalars, scalars.new_ones(1)])  # and the number of ranks that report
        reported = reported if world.reports else torch.zeros_like(reported)
        read = scalars.new_tensor([tokens, 1.0] if world.loads else [0.0, 0.0])  # and of those that read data
        summed = torch.cat([reported, read])
        dist.all_reduce(summed)
        scalars, tokens = summed[:-3] / summed[-3], float(summed[-2] / summed[-1])
    losses, *others = torch.split(scalars.cpu(), [len(values) for values in meter.scalars.values()])
    meter.pause()  # here: until now a device may not have done what it was given
    for each in run.engines.values():
        each.skipped_steps  # noqa: B018 (asks the device about the last step)
    _note_skipped(run, meter)
    means = {name: float(values.mean()) for name, values in zip(list(meter.scalars)[1:], others, strict=True)}
    steps = len(losses)
    finite = _require_finite_losses(run, meter, losses.tolist())
    norm = engine.get_global_grad_norm()
    for name, skipped in meter.skipped.items():
        _tell_skipped(run, name, skipped)
    seconds = max(meter.seconds, 1e-9)
    per_epoch = run.loader.samples_per_epoch
    own = {
        "step": run.step,
        "epoch": engine.global_samples / per_epoch if per_epoch else 0.0,
        "loss": sum(finite) / len(finite) if finite else math.nan,
        "lr": engine.last_lr[0],
        "grad_norm": norm,
        "samples_per_second": steps * engine.train_batch_size() / seconds,
        "tokens_per_second": tokens * world.world_size / seconds,
        "eta_seconds": meter.estimate(steps, run.max_steps - run.step),
    }
    if engine.precision.needs_scale:
        own["loss_scale"] = engine.loss_scale()
    run.last_record = {**own, **means, **_read_others(run), **run.training_measures.finish()}
    meter.reset()
    run.tell("on_log", run.last_record)


def _require_finite_losses(run: Run, meter: _Meter, losses: list[float]) -> list[float]:
    """The losses of the steps that were taken. Raises NonFiniteLossError.

    An overflow of fp16 may show in the loss already: the step is left out then, and has done no harm. bf16 has the
    range of fp32: there, as in fp32, weights or data are to blame, and no later step will mend them.
    """
    steps = dict(enumerate(losses, start=run.step - len(losses) + 1))
    skipped = meter.skipped.get(next(iter(run.engines)), set()) if run.engine.precision.needs_scale else set()
    kept = {step: value for step, value in steps.items() if step not in skipped or math.isfinite(value)}
    for step, value in kept.items():
        _require_finite(run, "the loss", value, step)
    # Losses show what earlier steps have done to the weights; of the last step only its gradients tell, before a save.
    for name, engine in run.engines.items():
        if engine.was_step_applied():
            of = f" of {name}" if len(run.engines) > 1 else ""
            _require_finite(run, f"the gradients' norm{of}", engine.get_global_grad_norm(), run.step)
        elif engine.precision.needs_scale:
            continue  # a loss scale answers to overflows, or is what the document asks for
        elif run.step == run.max_steps and engine.skipped_steps == engine.global_steps > 0:
            what = f"no step{f' of {name}' if len(run.engines) > 1 else ''} was taken: the gradients' norm"
            _require_finite(run, what, engine.get_global_grad_norm(), run.step)
    return list(kept.values())


def _read_others(run: Run) -> dict[str, float]:
    """Rate, norm and loss scale of the engines after the first, by `<name>/...`; tells of one that does not train."""
    values: dict[str, float] = {}
    for name, engine in list(run.engines.items())[1:]:
        if engine.optimizer is None:
            continue
        if engine.global_steps == 0:
            run.say("idle", f"{name} has an optimizer, and has taken no step yet")
            continue
        values |= {f"{name}/lr": engine.last_lr[0], f"{name}/grad_norm": engine.get_global_grad_norm()}
        if engine.precision.needs_scale:
            values[f"{name}/loss_scale"] = engine.loss_scale()
    return values


def _tell_skipped(run: Run, name: str, skipped: set[int]) -> None:
    count, engine = len(skipped), run.engines[name]
    of = f" of {name}" if len(run.engines) > 1 else ""
    steps = f"{count} step{'s' if count > 1 else ''}{of}, the last one {max(skipped)}"
    why = f"gradients overflowed fp16; the loss scale is {engine.loss_scale():g} now"
    run.say("skipped", f"{steps}: {why if engine.precision.needs_scale else 'gradients were not finite'}")


def _require_finite(run: Run, what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        good = f"the last good checkpoint is {run.last_saved}" if run.last_saved else "there is no checkpoint yet"
        raise NonFiniteLossError(
            f"{what} became {value} in step {step}; {good}",
            hint="lower optimizer.params.lr, lengthen the warm-up, lower gradient_clipping, or look at that batch",
        )
