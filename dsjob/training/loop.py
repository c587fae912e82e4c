"""The training loop: passes batches through the engine, and logs, evaluates and saves checkpoints in between.

The loop never waits for the device between log records. A record collects the losses of all steps since the previous
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dsjob.checkpoint.live.objects import capture_objects
from dsjob.checkpoint.live.rng import capture_rng, keep_rng, restore_rng
from dsjob.data import StreamLoader, to_device
from dsjob.data.batches import count_elements, is_tokens
from dsjob.data.given import GivenLoader
from dsjob.errors import ContractError
from dsjob.ranks import patience
from dsjob.ranks.watchdog import position
from dsjob.training.averaging import Part, Step
from dsjob.training.due import Due, evaluates_after
from dsjob.training.evaluation import Evaluator
from dsjob.training.occasions import Occasions
from dsjob.training.records import Meter, note_skipped, record
from dsjob.training.resume import load_best
from dsjob.training.run import Run
from dsjob.training.saves import describe_end, is_among_best, lacks_metrics, rate, save, settle


def train(run: Run) -> None:
    """Trains from the engine's current step to `run.max_steps`, or until a callback or user asks for the end.

    Raises NonFiniteLossError, ContractError, DataError, CheckpointError, StorageError; Preempted after SIGTERM,
    Interrupted after Ctrl-C.
    """
    occasions = run.occasions or Occasions(run.spec.checkpoint, run.engine.world, None, requests=run.requests)
    # The watchdog calls it when another rank has failed.
    position.settle = run.checkpointer.give_up
    with occasions.watch(run.step):
        try:
            _train(run, occasions)
        except KeyboardInterrupt:  # a second Ctrl-C: stop at once, without waiting for a save
            raise
        except BaseException as error:
            position.doing = "ending"
            run.tell_error(error)
            run.checkpointer.give_up(patience.TO_SETTLE)
            raise
    position.doing = "finishing"  # from here on, no collectives
    run.tell("on_end")


def finish(run: Run) -> None:
    """Runs the final evaluation if an earlier run saved its last step but failed before or during that evaluation."""
    run.tell("on_start")
    _make_up(run)
    position.doing = "finishing"
    run.tell("on_end")


def _make_up(run: Run) -> None:
    evaluate(run)
    save(run, wait=True, replace=True)


def evaluate(run: Run) -> None:
    """Evaluates, steps schedules that depend on the evaluation loss, updates the progress and calls the callbacks.

    A collective. Training draws the same random numbers as without it: a run that ends with an evaluation and is
    continued later has evaluated once more than one that ran through.
    """
    assert run.evaluator is not None
    run.engines.align_buffers()
    # Copies: a forward pass may change buffers in place.
    before = [buffer.clone() for buffer in run.evaluator.list_buffers()]
    with keep_rng(run.engine.device), run.engine.strategy.parts("evaluation"):
        _evaluate(run, run.evaluator)
    after = run.evaluator.list_buffers()
    run.progress.buffers_changed = len(before) != len(after) or not all(map(torch.equal, before, after))


def _evaluate(run: Run, evaluator: Evaluator) -> None:
    run.requests.evaluates = False
    run.tell("on_eval_start")
    found = run.parts.run_evaluation(evaluator)
    for each in run.engines.values():
        if isinstance(each.lr_scheduler, ReduceLROnPlateau):
            if evaluator.followed not in found:
                raise ContractError(f"ReduceLROnPlateau requires {evaluator.followed}, which evaluate did not return")
            each.lr_scheduler.step(found[evaluator.followed])
    run.progress.last_evaluation, run.progress.evaluated_at = found, run.step
    run.tell("on_eval", found)


def _begin(run: Run) -> None:
    """Prepares for the first step: calls callbacks, and evaluates, or rehearses an evaluation to find errors early."""
    engine = run.engine
    random = capture_rng(engine.device)
    run.tell("on_start")
    if run.step:
        # A resumed run must draw the same random numbers as an uninterrupted one, which calls on_start only once.
        restore_rng(random, engine.device)
    capture_objects(engine.world.everyone, run.kept)  # fails early if some state cannot be saved
    if run.evaluator is not None and run.spec.trainer.eval_at_start and run.step == 0:
        evaluate(run)
    elif run.step and evaluates_after(run) and lacks_metrics(run):
        _make_up(run)  # the previous run ended after the save and before the evaluation of this step
    elif run.evaluator is not None:
        run.evaluator.rehearse(run.say, adds=run.parts.overrides("evaluate"))
    run.engines.train()
    run.measures.start()


def _train(run: Run, occasions: Occasions) -> None:
    engine = run.engine
    # The position in a map-style dataset follows from the number of samples seen, so checkpoints need not store it.
    run.loader.seek(engine.global_samples)
    if isinstance(run.loader, (StreamLoader, GivenLoader)) and (replay := run.loader.describe_replay()):
        run.say("note", replay)
        run.loader.say = partial(run.say, "replay")
    batches = iter(run.loader)
    _begin(run)
    # A callback may already have asked for the end in on_start.
    run.requests.ended = occasions.hear().ends if run.spec.callbacks else ""
    meter = Meter()
    run.passed.start()
    position.doing = "training"
    while run.step < run.max_steps and not run.requests.ended:
        _take_step(run, batches, meter)
        position.step = run.step
        run.tell("on_step")
        # Signals, touched files and the clock may differ between ranks, so the ranks agree on what to do.
        agreed = occasions.agree(run.step, news=run.checkpointer.has_news)
        if agreed.news:
            occasions.note_settled(settle(run))
        run.passed.end_step(agreed.seconds)
        run.end_at_length()
        # From here on, all ranks decide alike: the step is the same on all, and `agreed` was agreed on.
        due = Due.after_step(run, agreed)
        if due.logs or due.evaluates or due.saves:
            _end_step(run, occasions, meter, due)
            position.doing = "training"
            meter.start()
    # A background save of the last steps may still be running.
    settle(run)
    run.engines.align_buffers()
    load_best(run)
    occasions.note_end()


def _end_step(run: Run, occasions: Occasions, meter: Meter, due: Due) -> None:
    """Logs, evaluates and saves, in this order, what is due after a step. Raises the end that a signal asks for."""
    # First, because it raises if a loss is not finite: weights behind such a loss must not be saved.
    record(run, meter)
    _hear_callbacks(run, occasions, due)
    # Save before the evaluation, so that a failing or long evaluation cannot lose the step. A second save afterwards
    # adds the metrics, unless `rate` can add them to the first. Where it cannot, as with a callback that keeps the best
    # value, later evaluations come first: they have worked before, and two saves of a large model cost more.
    early = due.evaluates and due.saves and (bool(due.stops) or not run.progress.evaluates_first)
    position.doing = "saving"
    saved = early and save(run, wait=due.waits)
    if due.evaluates:
        position.doing = "evaluating"
        evaluate(run)
        _hear_callbacks(run, occasions, due)
        due.saves = due.saves or is_among_best(run)
        position.doing = "saving"
    if due.saves and not (saved and rate(run)):
        run.progress.evaluates_first |= saved
        saved = save(run, wait=due.waits, replace=early)
    if due.saves:
        behind = run.spec.checkpoint.async_ and not due.waits
        occasions.note_save(behind=behind) if saved else occasions.note_failure()
        if due.stops and not due.last:
            raise describe_end(run, due.stops, saved=saved)


def _hear_callbacks(run: Run, occasions: Occasions, due: Due) -> None:
    """Adds what callbacks have asked for at this step. A collective if the job has callbacks."""
    if run.spec.callbacks:
        due.add(run, occasions.hear())


def _take_step(run: Run, batches: Iterator[Any], meter: Meter) -> None:
    """Takes one optimizer step and adds its scalars, means over this rank's micro batches, to the meter."""
    engine, before = run.engine, run.step
    calls, tokens = engine.rhythm.accumulation, [0]
    sums: dict[str, Tensor] = {}
    delivered: Iterator[tuple[Any, Part]] = _deliver(run, batches, calls, tokens)
    if run.spec.trainer.disable_auto_grad_accumulation:  # one call, which takes the batches itself
        delivered, calls = iter([((batch for batch, _ in delivered), Part(Step(engine.world, 1)))]), 1
    if run.pipelined is not None:  # one call for all micro batches
        pairs, calls = list(delivered), 1
        sums, part = run.pipelined.run(run.engines, pairs), pairs[-1][1]
        delivered = iter(())
    for batch, part in delivered:
        scalars = run.micro_step(run.engines, batch, part)
        if run.spec.trainer.step is not None or run.parts.overrides("training_step"):
            scalars = meter.names.require(scalars, engine.world)
        for name, value in scalars.items():
            # Sums stay on the device: reading one here would make the host wait in every step.
            sums[name] = sums[name] + value if name in sums else value
    meter.tokens += tokens[0]
    run.passed.count_tokens(tokens[0], engine.world)
    if run.spec.trainer.step is not None:
        _require_step(run, before, calls)
    note_skipped(run, meter)
    for name, total in sums.items():
        mean = total / calls if calls > 1 else total
        meter.scalars.setdefault(name, []).append(part.step.finish(mean) if name == "loss" else mean)


def _deliver(run: Run, batches: Iterator[Any], count: int, tokens: list[int]) -> Iterator[tuple[Any, Part]]:
    """The micro batches of a step on the device. Adds their tokens to the only element of `tokens`."""
    timer = run.engine.strategy.parts
    for given, part in timer.reading(run.averaging.read(batches, count)):
        # Labels were counted on the host before this copy.
        with timer("data"):
            batch = to_device(given, run.engine.device)
        position.micro_steps += 1
        tokens[0] += count_elements(batch) if is_tokens(batch) else 0
        yield batch, part


def _require_step(run: Run, before: int, calls: int) -> None:
    """Raises ContractError unless trainer.step took exactly one step of the first engine, and left no other engine in
    the middle of gradient accumulation."""
    advice = "call engine.backward(loss) and engine.step() of each engine in every call"
    if run.step != before + 1:
        first, steps = next(iter(run.engines)), run.step - before
        times = f"{calls} time{'s' * (calls > 1)}"
        raise ContractError(
            f"trainer.step was called {times}, and the first model, {first}, took {steps} steps, not 1",
            hint="list first the model that steps once per call" if steps > 1 else advice,
        )
    for name, engine in run.engines.items():
        if engine.rhythm.done:
            raise ContractError(
                f"{name} is in the middle of accumulating gradients when a step of the first model ends;"
                " checkpoints are saved at that point, and cannot contain gradients",
                hint=advice,
            )
