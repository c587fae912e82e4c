"""Runs a training job on one rank: builds its parts in order, trains, and writes the result."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from dsjob import storage
from dsjob.callbacks.callback import Callback
from dsjob.checkpoint.live.committed import Loaded
from dsjob.checkpoint.live.objects import Kept
from dsjob.checkpoint.pretrained.configuration import describe_pretrained
from dsjob.compute.precision import matmul_precision
from dsjob.contract import locations
from dsjob.contract.masking import mask
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import JobSpec
from dsjob.data import StreamLoader
from dsjob.data.given import StatefulLoader
from dsjob.errors import DsjobError, StorageError
from dsjob.monitors.delivery import Delivery
from dsjob.ranks.mesh import World
from dsjob.ranks.seeding import seed_rng
from dsjob.ranks.waiting import waiting_for_all
from dsjob.run_folder import LOGS_NAME, SAVE_REQUEST, STOP_REQUEST, TRACEBACK_PREFIX, read_result, write_result
from dsjob.terminal import format_traceback, quote_path, quote_word
from dsjob.torch_private.compile_cache import use_private_cache
from dsjob.training import build, loop
from dsjob.training.advice import note_few_samples, train_longer
from dsjob.training.checkpoints import build_checkpointer
from dsjob.training.directions import settle_best
from dsjob.training.display import Display, make_display, show_seconds
from dsjob.training.loaders import build_collate, build_evaluation_sets, build_training_data, share_samples
from dsjob.training.monitoring import MonitorValues
from dsjob.training.objective import build_objective
from dsjob.training.occasions import Occasions
from dsjob.training.passed import Passed, require_samples
from dsjob.training.pipelines import PipelinedStep, build_passes, read_first
from dsjob.training.requests import Requests
from dsjob.training.resume import find_best, load_best, resume
from dsjob.training.run import Result, Run
from dsjob.training.run_files import EnvironmentFile, RunFiles
from dsjob.training.saves import lacks_metrics
from dsjob.training.stage_models import build_stage_models
from dsjob.training.summary import describe_run
from dsjob.training.tasks import Outcome, Tasks, build_tasks, choose_sets, list_roles, run_alone
from dsjob.trust.exits import refuse_exits
from dsjob.trust.frames import needs_traceback, point_to_traceback
from dsjob.trust.grant import Trust

_EVALUATED = ("data.eval", "data.test", "metrics")  # keys that an evaluation uses and a training does not


def run_job(job: ResolvedJob, run_dir: str, world: World, trust: Trust) -> Result:
    """Runs a resolved job on this rank. `run_dir`: the run's folder, which must exist.

    Raises DsjobError for errors that the user can fix. Exceptions of the user's own code pass through, except attempts
    to end the process, which become an ExitError.
    """
    locations.allow(lambda: trust.prefixes)
    spec = job.spec
    display = make_display(shown=world.everyone.rank == 0)
    started = time.monotonic()
    with suppress(StorageError):  # only compiling needs it, which raises it again
        use_private_cache()
    try:
        if not spec.trains:
            with refuse_exits(), matmul_precision(spec.trainer.matmul_precision):
                return run_alone(job, run_dir, world, display, trust)
        # Before models are built: random generators are seeded then.
        monitors = build.build_monitors(spec, world, trust)
        delivery = Delivery(monitors, name=spec.name, run_dir=run_dir, document=job.document, say=display.say)
        with refuse_exits(), matmul_precision(spec.trainer.matmul_precision), delivery:
            run, tasks, loaded = _prepare(job, run_dir, world, display, trust, delivery)
            run.end_at_length()
            finished = run.step >= run.max_steps
            evaluates = finished and run.evaluator is not None and lacks_metrics(run)
            if not finished or evaluates:
                display.table(f"dsjob {spec.name}", describe_run(run, run_dir, loaded))
            if evaluates:
                loop.finish(run)
            if finished:
                return _say_finished(run, tasks, run_dir, display, job.given)
            begun_at = run.step
            with _keeping_traceback(run, run_dir):
                loop.train(run)
                if run.requests.ended:
                    display.say("stopped", f"after step {run.step:,} of {run.max_steps:,}: {run.requests.ended}")
                if run.step == begun_at:
                    return _end_untrained(run, tasks, run_dir, display)
                outcome = tasks.run(display.say)
    finally:
        display.close()
    progress = run.progress
    metrics: dict[str, float] = {
        name: progress.last_record[name] for name in ("loss", "lr") if name in progress.last_record
    }
    result = _make_result(run, metrics, outcome)
    if world.everyone.rank == 0:
        ended = {"status": "unsaved", "error": progress.unsaved} if progress.unsaved else {"status": "done"}
        write_result(run_dir, {**ended, **dataclasses.asdict(result)})
        display.say(ended["status"], f"step {run.step:,} in {show_seconds(time.monotonic() - started)}")
    return result


@contextmanager
def _keeping_traceback(run: Run, run_dir: str) -> Iterator[None]:
    """Keeps the traceback of an error of user code in the run's logs, and makes the error's hint name the file.

    Not before the first step: a start that fails leaves no folder, and is quickly repeated with --debug.
    """
    try:
        yield
    except Exception as error:
        if run.step and needs_traceback(error):
            rank = run.engine.global_rank
            file = os.path.join(run_dir, LOGS_NAME, f"{TRACEBACK_PREFIX}{rank:05d}.txt")
            where = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, rank {rank}, after step {run.step}"
            text = "".join(f"{line}\n" for line in (where, *format_traceback(error)))
            with suppress(DsjobError, OSError):  # a full disk must not hide the error
                os.makedirs(os.path.dirname(file), exist_ok=True)
                storage.write_bytes(file, mask(text).encode())
                point_to_traceback(error, file)
        raise


def _make_result(run: Run, metrics: dict[str, float], outcome: Outcome) -> Result:
    """The result of a run; `metrics`: of its last log record, or of an earlier result. A collective."""
    engines, best = list(run.engines.values()), find_best(run)
    return Result(
        step=run.step,
        epochs=_count_epochs(run),
        metrics={**metrics, **(best["metrics"] if best else run.progress.last_evaluation), **outcome.metrics},
        checkpoint=storage.join(run.checkpointer.url, best["dir"]) if best else run.progress.last_saved,
        predictions=list(outcome.predictions.values()),
        pretrained=len(engines) == 1 and bool(describe_pretrained(engines[0].module)),
        stopped=run.requests.ended,
        best_step=best["step"] if best else None,
    )


def _count_epochs(run: Run) -> float | None:
    samples = run.loader.samples_per_epoch
    return run.step * run.spec.trainer.train_batch / samples if samples else None


def _prepare(
    job: ResolvedJob, run_dir: str, world: World, display: Display, trust: Trust, delivery: Delivery
) -> tuple[Run, Tasks, Loaded | None]:
    """Builds the run and the tasks after it, and loads the checkpoint that it resumes from; None if it starts from
    scratch."""
    spec = job.spec
    # The order below is fixed: all ranks call the same collectives in it, and random numbers are drawn in it.
    world = build.divide_ranks(spec, world, trust)
    models, complete = build_stage_models(job, world, trust, display.say)
    collate = build_collate(spec, trust)
    # Data before engines: the length of an epoch sets the length of schedules.
    parts = build.build_parts(spec, trust)
    with waiting_for_all(world, "data.train"):
        loader = build_training_data(spec, world, collate, trust, parts.trainer.get_train_dataloader)
    share_samples(loader, world)
    sets = build_evaluation_sets(spec, world, collate, trust, *list_roles(spec), read=parts.read_set)
    _require_enough(spec, loader.samples_per_epoch, display)
    steps = build.count_steps(spec.trainer, loader.samples_per_epoch)
    passes = build_passes(models, spec, world, trust, lambda: read_first(spec, loader, collate, trust, parts), complete)
    engines = build.build_engines(models, job, world, trust, steps=steps, parts=parts, passes=passes)
    seed_rng(spec.trainer.seed + world.data_rank)  # data-parallel ranks draw different numbers from here on
    objective = build_objective(spec, engines.first.module, world.device, trust)
    callbacks = build.build_callbacks(spec, trust)
    eval_measures, eval_metrics = build.build_measures("eval", spec, world, trust)
    job = settle_best(job, eval_metrics, display.say)
    measures, metrics = build.build_measures("train", spec, world, trust)
    data = {"train": loader} if isinstance(loader, StatefulLoader | StreamLoader) else {}
    passed = Passed(spec, loader.samples_per_epoch)
    counted = {"tokens_and_time": passed} if passed.is_needed else {}
    named = {"callbacks": callbacks, "metrics": eval_metrics, "training_metrics": metrics, "data": data}
    kept = Kept(display.say, **named, passed=counted)
    objective = parts.bind(engines, objective, measures)
    micro_step = build.build_micro_step(spec, engines, objective, measures, trust, parts, display.say)
    given: dict[str, Any] = {"collate": collate, "objective": objective, "measures": eval_measures}
    ours = choose_sets(spec, sets, "eval")
    evaluator = build.build_evaluator(spec, engines, ours, trust, **given) if ours else None
    tasks = build_tasks(spec, engines, sets, trust, run_dir, parts=parts, **given)
    requests = Requests()
    run = Run(
        spec=job.spec,
        engines=engines,
        loader=loader,
        max_steps=steps,
        passed=passed,
        parts=parts,
        checkpointer=build_checkpointer(job, run_dir, world, trust, kept),
        occasions=_watch_occasions(spec, run_dir, world, requests, passed),
        requests=requests,
        folder=run_dir,
        callbacks=[*_list_own(job, run_dir, display, delivery), *callbacks.values()],
        say=display.say,
        micro_step=micro_step,
        pipelined=PipelinedStep(objective, measures, parts) if passes is not None else None,
        averaging=build.build_averaging(spec, engines, objective),
        measures=measures,
        evaluator=evaluator,
        kept=kept,
    )
    run.tell("on_setup")
    return run, tasks, resume(run, job)  # last, since it loads into everything that was built


def _require_enough(spec: JobSpec, samples: int | None, display: Display) -> None:
    if note := note_few_samples(samples, spec.trainer.train_batch):
        display.say("note", note)
    require_samples(spec, samples)


def _list_own(job: ResolvedJob, run_dir: str, display: Display, delivery: Delivery) -> list[Callback]:
    """The callbacks that every run has. They come before those of the document."""
    return [RunFiles(run_dir, job), EnvironmentFile(run_dir), display, MonitorValues(delivery)]


def _watch_occasions(spec: JobSpec, run_dir: str, world: World, requests: Requests, passed: Passed) -> Occasions:
    save_request, stop_request = (os.path.join(run_dir, name) for name in (SAVE_REQUEST, STOP_REQUEST))
    return Occasions(
        spec.checkpoint,
        world,
        save_request,
        grace=spec.launch.grace,
        stop_request=stop_request,
        requests=requests,
        read_clock=passed.read_clock,
    )


def _say_finished(run: Run, tasks: Tasks, run_dir: str, display: Display, given: Mapping[str, Any]) -> Result:
    """Reports that nothing is left to train, and runs the other tasks. given: the job as it was given."""
    trainer = run.spec.trainer
    longer = train_longer(
        trainer.max_steps, trainer.max_epochs, trainer.max_length, step=run.step, epochs=_count_epochs(run)
    )
    beyond = f"{run.step:,} steps are done, more than the {run.max_steps:,} of this job"
    done = beyond if run.step > run.max_steps else f"step {run.step:,} of {run.max_steps:,}"
    more = tasks.evaluator is not None or tasks.predictor is not None
    undone = "nothing was trained" if run.progress.last_evaluation or more else "nothing was trained or evaluated"
    # The folder keeps the job that was trained, so changes of the data have to be given again.
    words = [word for word in given.get("overrides", ()) if word.lstrip("+~").startswith(_EVALUATED)]
    evaluation = " ".join(["dsjob eval", quote_path(run_dir), *map(quote_word, words)])
    again = f"; to evaluate it, run {evaluation}" if run.evaluator is not None and not more else ""
    new = "to train with other settings, set a new output.dir"
    display.say("already finished", f"{done}: {undone}; to train longer, set {longer}{again}; {new}")
    if more:
        load_best(run)
    return _end_untrained(run, tasks, run_dir, display)


def _end_untrained(run: Run, tasks: Tasks, run_dir: str, display: Display) -> Result:
    """Runs the other tasks of a run that took no step. Keeps the existing result file, unless something was evaluated
    or predicted."""
    before = read_result(run_dir)
    before = before if "step" in before else {}  # that of a run that failed after its last step
    outcome = tasks.run(display.say)
    result = _make_result(run, before.get("metrics", {}), outcome)
    has_news = run.progress.last_evaluation or outcome.metrics or outcome.predictions
    if run.engine.global_rank == 0 and (not before or has_news):
        write_result(run_dir, {"status": "done", **dataclasses.asdict(result)})
    return result
