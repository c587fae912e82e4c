"""The tasks of a job besides training: evaluating sets of data, after training or alone.

A task that runs alone builds only what it needs: no training data, no optimizer, no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.other.elsewhere import is_own
from dsjob.checkpoint.root.source import locate, renamed
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import JobSpec
from dsjob.engine.several import Engines
from dsjob.errors import NoCheckpointError
from dsjob.ranks.agreement import on_rank_0
from dsjob.ranks.mesh import World
from dsjob.ranks.seeding import seed_rng
from dsjob.ranks.watchdog import position
from dsjob.run_folder import append_given, write_resolved, write_result
from dsjob.training import build
from dsjob.training.checkpoints import build_checkpointer
from dsjob.training.display import Display
from dsjob.training.evaluation import Evaluator, name_data
from dsjob.training.loaders import build_collate, build_evaluation_sets
from dsjob.training.metrics import Measures
from dsjob.training.objective import Objective, build_objective
from dsjob.training.pipelines import build_passes, read_first_evaluated
from dsjob.training.predict import Predictor
from dsjob.training.resume import describe_averages, require_no_averages
from dsjob.training.run import Result
from dsjob.training.stage_models import build_stage_models
from dsjob.training.trainer import Parts
from dsjob.trust.grant import Trust

Say = Callable[[str, str], None]


@dataclass(frozen=True)
class Source:
    """The weights that a task uses. url: of the checkpoint; None: the model as it was built."""

    url: str | None = None
    step: int = 0
    which: str = ""  # whether these are weights or their averages, if the checkpoint has both


@dataclass(frozen=True)
class Outcome:
    """The outcome of tasks besides training."""

    metrics: dict[str, float]
    predictions: dict[str, str]  # the files, by the prefix of their set


@dataclass(frozen=True)
class Tasks:
    """The tasks of a job besides training, in their order. None: not a task of this job, or nothing is left to do."""

    evaluator: Evaluator | None
    predictor: Predictor | None
    parts: Parts

    def run(self, say: Say) -> Outcome:
        """Runs the tasks, and shows what they found. A collective."""
        metrics: dict[str, float] = {}
        predictions: dict[str, str] = {}
        if self.evaluator is not None:
            position.doing = "evaluating"
            metrics = self.parts.run_evaluation(self.evaluator)
            say("eval", "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if self.predictor is not None:
            position.doing = "predicting"
            predictions = self.parts.run_prediction(self.predictor)
            for prefix, url in predictions.items():
                say("predicted", f"{name_data(prefix)}  {url}")
        return Outcome(metrics, predictions)


def list_roles(spec: JobSpec) -> tuple[Literal["eval", "test"], ...]:
    """The roles of the sets that the tasks of a job read."""
    return ("eval", "test") if set(spec.tasks) - {"train"} else ("eval",)


def choose_sets(spec: JobSpec, sets: Mapping[str, Any], *roles: Literal["eval", "test"]) -> dict[str, Any]:
    """Those of `sets` that have these roles."""
    return {prefix: sets[prefix] for prefix in spec.data.list_sets(*roles)}


def build_tasks(
    spec: JobSpec,
    engines: Engines,
    sets: Mapping[str, Any],
    trust: Trust,
    run_dir: str,
    *,
    parts: Parts,
    collate: Any,
    objective: Objective,
    measures: Measures | None,
) -> Tasks:
    """The tasks of a job besides training. Its arguments are those of `build_evaluator`. Raises TargetError."""
    # The last evaluation of a training has the final weights: only the test set is left.
    done = spec.trains and not spec.checkpoint.load_best_at_end
    roles: tuple[Literal["eval", "test"], ...] = ("test",) if done else ("eval", "test")
    evaluated = choose_sets(spec, sets, *roles) if "eval" in spec.tasks else {}
    evaluator = predictor = None
    if evaluated:
        evaluator = build.build_evaluator(
            spec, engines, evaluated, trust, collate=collate, objective=objective, measures=measures
        )
    if "predict" in spec.tasks:
        predicted = choose_sets(spec, sets, "test" if spec.data.test else "eval")
        step = build.build_eval_step(spec, trust)
        generator = build.build_generator(spec, trust)
        folder = spec.predict.dir or run_dir
        predictor = Predictor(spec, engines, predicted, folder, collate, step, objective, generator)
    return Tasks(evaluator, predictor, parts)


def run_alone(job: ResolvedJob, run_dir: str, world: World, display: Display, trust: Trust) -> Result:
    """Runs the tasks of a job that does not train, and writes their result. A collective."""
    spec = job.spec
    # The same order as in training; see `dsjob.training.job`.
    world = build.divide_ranks(spec, world, trust)
    models, complete = build_stage_models(job, world, trust, display.say)
    collate = build_collate(spec, trust)
    parts = build.build_parts(spec, trust)
    sets = build_evaluation_sets(spec, world, collate, trust, *list_roles(spec), read=parts.read_set)
    first = lambda: read_first_evaluated(spec, collate, trust, parts)  # noqa: E731
    passes = build_passes(models, spec, world, trust, first, complete)
    for model in models.values():
        model.requires_grad_(False)  # so that engines hold neither fp32 masters nor buckets for gradients
    engines = build.build_engines(models, job, world, trust, passes=passes)
    seed_rng(spec.trainer.seed + world.data_rank)
    objective = build_objective(spec, engines.first.module, world.device, trust)
    measures = build.build_measures("eval", spec, world, trust)[0] if "eval" in spec.tasks else None
    objective = parts.bind(engines, objective, Measures())
    given: dict[str, Any] = {"collate": collate, "objective": objective, "measures": measures}
    tasks = build_tasks(spec, engines, sets, trust, run_dir, parts=parts, **given)
    source = _load(job, engines, run_dir, world, trust, display.say)
    display.table(f"dsjob {spec.name}", _describe(tasks, source, world, run_dir))
    if world.everyone.rank == 0:
        write_resolved(run_dir, job.document)
        append_given(run_dir, job.given)
    outcome = tasks.run(display.say)
    result = Result(source.step, None, outcome.metrics, source.url, False, list(outcome.predictions.values()))
    if world.everyone.rank == 0:
        write_result(run_dir, {"status": "done", **asdict(result), "ema": spec.checkpoint.ema})
    return result


def _load(job: ResolvedJob, engines: Engines, run_dir: str, world: World, trust: Trust, say: Say) -> Source:
    """Loads the weights that `checkpoint.resume` names. Raises NoCheckpointError, CheckpointError."""
    spec, savable = job.spec, engines if job.spec.models else engines.first
    checkpointer = build_checkpointer(job, run_dir, world, trust)
    url = _find_url(spec, checkpointer)
    if url is None:
        say("note", "there is no checkpoint: the model is used as it was built")
        return Source()
    if not on_rank_0(world.everyone, lambda: is_own(url)):
        require_no_averages(url, ema=spec.checkpoint.ema)
        loaded = Checkpointer(url, world=world).load(
            savable, strict=spec.checkpoint.strict, optimizer=False, scheduler=False
        )
        return Source(loaded.url, loaded.step)
    matched = checkpointer.load_weights(savable, url, strict=spec.checkpoint.strict, ema=spec.checkpoint.ema)

    def read_step() -> int:
        with renamed(f"read {url}"):
            return int(locate(url)[1]["step"])

    which = describe_averages(matched, ema=spec.checkpoint.ema)
    return Source(matched.url, on_rank_0(world.everyone, read_step), which)


def _find_url(spec: JobSpec, checkpointer: Checkpointer) -> str | None:
    policy = spec.checkpoint.resume
    if "/" in policy:
        return policy
    tags = checkpointer.tags() if policy != "never" else []
    if policy in ("auto", "never", "required"):
        if not tags and policy == "required":
            raise NoCheckpointError(f"checkpoint.resume is required, but {checkpointer.url} contains no checkpoint")
        return storage.join(checkpointer.url, tags[0]) if tags else None
    return storage.join(checkpointer.url, policy)


def _describe(tasks: Tasks, source: Source, world: World, run_dir: str) -> list[tuple[str, str]]:
    """(title, text) rows with what a user may want to check before waiting for the tasks."""
    sets = dict.fromkeys(prefix for task in (tasks.evaluator, tasks.predictor) if task for prefix in task.sets)
    return [
        (
            "weights",
            f"{source.url} at step {source.step:,}{source.which}" if source.url else "the model as it was built",
        ),
        ("data", ", ".join(map(name_data, sets))),
        ("device", f"{world.device.type}, {world.everyone.size} rank{'s' * (world.everyone.size > 1)}"),
        ("output", run_dir),
    ]
