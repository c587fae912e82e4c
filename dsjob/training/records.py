"""The log record: a summary of the steps since the previous record, collected from the device and from all ranks.

Losses stay on the device until a record is due, so that no step waits for the device.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.callbacks.memory_use import GIB, read_peak
from dsjob.errors import NonFiniteLossError
from dsjob.training.run import Run
from dsjob.training.steps import Names


class Meter:
    """Collects scalars, tokens and training time since the last record. For the whole run, it also measures the time
    outside of training: records, evaluations, saves and callbacks. Scalars stay on the device until they are read."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[Tensor]] = {}  # by name, one per step; `loss` comes first
        self.skipped: dict[str, set[int]] = {}  # by engine, the skipped steps since the last record
        self.skips: dict[str, int] = {}  # by engine, the number of skipped steps in the whole run, as far as known
        self.tokens = 0
        self.seconds = 0.0
        self.names = Names("trainer.step")
        self._steps, self._beside = 0, 0.0  # steps, and seconds outside of training, of the whole run
        self._turned = time.perf_counter()

    def start(self) -> None:
        """Called when training continues."""
        self._beside += self._turn()

    def pause(self) -> None:
        """Called when something other than training begins."""
        self.seconds += self._turn()

    def _turn(self) -> float:
        before, self._turned = self._turned, time.perf_counter()
        return self._turned - before

    def estimate(self, steps: int, left: int) -> float:
        """Estimates the wall-clock seconds of `left` more steps: the training time per step since the last record
        (`steps` ago), plus the average time outside of training per step of the run."""
        self._steps += steps
        return (self.seconds / steps + self._beside / self._steps) * left

    def reset(self) -> None:
        self.scalars, self.skipped, self.tokens, self.seconds = {}, {}, 0, 0.0


def note_skipped(run: Run, meter: Meter) -> None:
    """Notes the steps that engines have skipped. They may not know about the last step yet."""
    for name, each in run.engines.items():
        rhythm = each.rhythm
        if rhythm.skipped_steps > meter.skips.get(name, 0):
            meter.skipped.setdefault(name, set()).add(run.step - (rhythm.global_steps - rhythm.last_skipped))
        meter.skips[name] = rhythm.skipped_steps


def record(run: Run, meter: Meter) -> None:
    """Builds the log record of this step and passes it to the callbacks. A collective.

    Raises NonFiniteLossError if a loss or a gradient norm is not finite.
    """
    engine, world = run.engine, run.engine.world
    if run.loader.samples_per_epoch is None:
        run.loader.passes.require_same(world, loads=world.loads)
    # fp32 [names * steps]: all scalars side by side, so that one all-reduce is enough.
    scalars = torch.cat([torch.stack(values).float().to(engine.device) for values in meter.scalars.values()])
    tokens, peak = float(meter.tokens), read_peak(engine.device) / GIB
    if world.everyone.size > 1:
        # Means over the ranks that report, and over those that read data: both are summed together with their number.
        reported = torch.cat([scalars, scalars.new_ones(1)])
        # fp32 [names * steps + 1]: a rank without losses adds zeros, and zero to the number of ranks.
        reported = reported if world.reports else torch.zeros_like(reported)
        read = scalars.new_tensor([tokens, 1.0] if world.loads else [0.0, 0.0])
        # A sum cannot find the largest peak, so each rank has an element of its own. fp32 [ranks]
        peaks = scalars.new_zeros(world.everyone.size)
        peaks[world.everyone.rank] = peak
        # [scalars, reporting ranks, tokens, reading ranks, peaks].
        summed = torch.cat([reported, read, peaks])
        dist.all_reduce(summed)
        count = len(scalars)
        scalars = summed[:count] / summed[count]
        _, tokens, reading, *found_peaks = summed[count:].tolist()
        tokens, peak = tokens / reading, max(found_peaks)
    losses, *others = torch.split(scalars.cpu(), [len(values) for values in meter.scalars.values()])
    meter.pause()  # not earlier: `cpu()` above waits until the device has finished the steps
    for each in run.engines.values():
        each.skipped_steps  # noqa: B018 (reads from the device whether the last step was skipped)
    note_skipped(run, meter)
    means = {name: float(values.mean()) for name, values in zip(list(meter.scalars)[1:], others, strict=True)}
    steps = len(losses)
    finite = _require_finite_losses(run, meter, losses.tolist())
    # No further wait: the steps have finished on the device.
    norm = engine.get_global_grad_norm()
    for name, skipped in meter.skipped.items():
        _tell_skipped(run, name, skipped)
    # Training alone: evaluations, saves and callbacks are not in it.
    seconds = max(meter.seconds, 1e-9)
    per_epoch = run.loader.samples_per_epoch
    own = {
        "step": run.step,
        "epoch": engine.global_samples / per_epoch if per_epoch else 0.0,
        "loss": sum(finite) / len(finite) if finite else math.nan,
        "lr": engine.last_lr[0],
        "grad_norm": norm,
        "samples_per_second": steps * engine.rhythm.train_batch / seconds,
        "tokens_per_second": tokens * world.data_size / seconds,
        "eta_seconds": meter.estimate(steps, run.expected_steps - run.step),
        "memory/peak_gib": peak,
    }
    if engine.precision.needs_scale:
        own["loss_scale"] = engine.loss_scale()
    found = {**own, **means, **_read_others(run), **run.measures.finish()}
    values = found | run.ask(found)
    meter.reset()
    run.parts.trainer.log(values)


def _require_finite_losses(run: Run, meter: Meter, losses: list[float]) -> list[float]:
    """The losses of all steps, without non-finite losses of skipped steps. Raises NonFiniteLossError.

    In fp16, an overflow can already make the loss non-finite. Such a step is skipped and does no harm. bf16 has the
    range of fp32, so in both a non-finite loss means that weights or data are bad, and later steps cannot repair it.
    """
    steps = dict(enumerate(losses, start=run.step - len(losses) + 1))
    tolerant = run.engine.precision.needs_scale or run.engine.strategy.guard is not None
    skipped = meter.skipped.get(next(iter(run.engines)), set()) if tolerant else set()
    kept = {step: value for step, value in steps.items() if step not in skipped or math.isfinite(value)}
    for step, value in kept.items():
        _require_finite(run, "the loss", value, step)
    # Losses show the effect of all earlier steps on the weights. For the last step, only the norm of its gradients can
    # show that the weights are bad, and a save may follow.
    for name, engine in run.engines.items():
        if engine.was_step_applied():
            of = f" of {name}" if len(run.engines) > 1 else ""
            _require_finite(run, f"the gradients' norm{of}", engine.get_global_grad_norm(), run.step)
        elif engine.precision.needs_scale:
            continue  # a dynamic loss scale adapts to overflows; a static one is the user's choice
        elif run.step == run.max_steps and engine.skipped_steps == engine.global_steps > 0:
            what = f"no step{f' of {name}' if len(run.engines) > 1 else ''} was taken: the gradients' norm"
            _require_finite(run, what, engine.get_global_grad_norm(), run.step)
    return list(kept.values())


def _read_others(run: Run) -> dict[str, float]:
    """Learning rate, gradient norm and loss scale of all engines but the first, under `<name>/...`.

    Reports an engine that has an optimizer and has not taken a step.
    """
    values: dict[str, float] = {}
    for name, engine in list(run.engines.items())[1:]:
        if engine.optimizer is None:
            continue
        if engine.global_steps == 0:
            run.say("idle", f"{name} has an optimizer but has not taken a step yet")
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
        saved = run.progress.last_saved
        good = f"the last good checkpoint is {saved}" if saved else "there is no checkpoint yet"
        raise NonFiniteLossError(
            f"{what} became {value} in step {step}; {good}",
            hint="lower optimizer.params.lr, lengthen the warm-up or lower gradient_clipping; the callback"
            " dsjob.callbacks.NanGuard names the parameter, and can skip such steps",
        )
