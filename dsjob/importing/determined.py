"""Determined's experiment configurations, as values of the job document."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dsjob.contract.directions import falls
from dsjob.contract.hints import suggest
from dsjob.contract.paths import Path
from dsjob.importing.given import MODULE, Draft, Given, Rank

_VARIED = ("int", "double", "log", "categorical")  # the types of hyperparameters that a search varies
_UNITS = {"batches": "ba", "records": "sp", "epochs": "ep"}
_PERIODS = {"min_validation_period": "trainer.eval_every", "min_checkpoint_period": "checkpoint.every"}
_CLUSTER = "it concerns Determined's cluster"
_OWN_LOOP = "for a program that calls deepspeed.initialize and trains itself, use dsjob exec"
# Keys that are left out, and why.
LEFT_OUT = {
    "entrypoint": "the job document defines what to run",
    "max_restarts": "start the job again, and it resumes",
    "records_per_epoch": "dsjob counts the samples of the data",
    "hyperparameters": "pass them to your model and data as arguments of their targets",
    "data": "pass it to your data as arguments of their targets",
    **dict.fromkeys(
        (
            "bind_mounts", "debug", "description", "integrations", "labels", "log_policies", "optimizations",
            "preemption_timeout", "profiling", "project", "retention_policy", "slurm", "pbs", "workspace",
        ),
        _CLUSTER,
    ),
}  # fmt: skip
_READ = (
    *_PERIODS, "name", "searcher", "checkpoint_policy", "checkpoint_storage", "resources", "environment",
    "reproducibility", "scheduling_unit", "perform_initial_validation",
)  # fmt: skip
KEYS = frozenset({*LEFT_OUT, *_READ})


class _Experiment:
    """The values of an experiment's configuration, by path."""

    def __init__(self, content: dict[str, Any], locate: Callable[[Path], str], draft: Draft) -> None:
        self.content, self.draft, self._locate = content, draft, locate

    def find(self, *path: str) -> Given | None:
        """The value at a path, unless it is absent or null."""
        value: Any = self.content
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return None if value is None else Given(value, ".".join(path), self._locate(path), Rank.ARGUMENTS)

    def copy(self, path: str, key: str) -> None:
        """Takes a value as it is."""
        if (given := self.find(*path.split("."))) is not None:
            self.draft.put(key, given)

    def leave_out(self, *path: str, about: str) -> None:
        if (given := self.find(*path)) is not None:
            self.draft.note("left out", f"{given.name}: {about}", given)

    def read_length(self, *path: str) -> Given | None:
        """A length such as `{batches: 100}`, or a number of batches; None if it is absent or 0."""
        given = self.find(*path)
        if given is None:
            return None
        ((unit, amount),) = given.value.items() if isinstance(given.value, dict) and len(given.value) == 1 else (
            ("batches", given.value),
        )  # fmt: skip
        if unit not in _UNITS or isinstance(amount, bool) or not isinstance(amount, int) or amount < 0:
            self.draft.refuse(given, f"must be a number of {', '.join(_UNITS)}, such as {{batches: 100}}")
            return None
        return given.to(f"{amount}{_UNITS[unit]}") if amount else None


def draft_determined(content: dict[str, Any], locate: Callable[[Path], str], draft: Draft) -> None:
    """Adds an experiment's values to the draft. The caller reads the DeepSpeed config that it names."""
    experiment = _Experiment(content, locate, draft)
    for key in content:
        if key in LEFT_OUT:
            experiment.leave_out(key, about=LEFT_OUT[key])
        elif key not in KEYS:
            place = Given(content[key], key, locate((key,)), Rank.ARGUMENTS)
            draft.note("unknown", f"{key}: {suggest(key, sorted(KEYS)) or 'unknown key of Determined'}", place)
    name = experiment.find("name")
    if name is not None:
        draft.put("name", name.to(re.sub(r"[^A-Za-z0-9._-]+", "-", str(name.value)).strip("-._") or "job"))
    experiment.copy("resources.slots_per_trial", "launch.nproc")
    experiment.copy("reproducibility.experiment_seed", "trainer.seed")
    experiment.copy("scheduling_unit", "trainer.log_every")
    experiment.copy("perform_initial_validation", "trainer.eval_at_start")
    _draft_searcher(experiment)
    _draft_checkpoints(experiment)
    _draft_environment(experiment)


def read_hyperparameter(
    content: dict[str, Any], name: str, locate: Callable[[Path], str], draft: Draft
) -> Given | None:
    """A hyperparameter of an experiment. One that a search varies is left out, also below it."""
    hyperparameters = content.get("hyperparameters")
    value = hyperparameters.get(name) if isinstance(hyperparameters, dict) else None
    if value is None:
        return None
    given = Given(value, name, locate(("hyperparameters", name)), Rank.ARGUMENTS)
    fixed = _fix(value, name, given, draft)
    return None if fixed is None else given.to(fixed)


def _fix(value: Any, name: str, given: Given, draft: Draft) -> Any:
    """A hyperparameter's value without Determined's longer forms; None for one that a search varies."""
    if not isinstance(value, dict):
        return value
    if value.get("type") == "const" and "val" in value:
        return value["val"]
    if value.get("type") in _VARIED and not value.keys().isdisjoint(("minval", "maxval", "vals")):
        draft.note("left out", f"{name}: sweep with dsjob -m", given)
        return None
    fixed = {key: _fix(item, f"{name}.{key}", given, draft) for key, item in value.items()}
    return {key: item for key, item in fixed.items() if item is not None or value[key] is None}


def _draft_searcher(experiment: _Experiment) -> None:
    length, method = experiment.read_length("searcher", "max_length"), experiment.find("searcher", "name")
    if length is not None:
        amount, unit = int(length.value[:-2]), length.value[-2:]
        key = {"ba": "trainer.max_steps", "ep": "trainer.max_epochs", "sp": "trainer.max_length"}[unit]
        experiment.draft.put(key, length.to(amount) if unit != "sp" else length)
    if method is not None and method.value not in ("single", "custom"):
        experiment.draft.note("left out", f"{method.label}: sweep with dsjob -m", method)


def _draft_checkpoints(experiment: _Experiment) -> None:
    """Determined saves at the end, each min_checkpoint_period, and after an evaluation: if it is better (`best`, the
    default), after each (`all`), or never (`none`)."""
    draft, storage = experiment.draft, "checkpoint_storage"
    found = {name: experiment.read_length(name) for name in _PERIODS}
    for name, length in found.items():
        if length is not None:
            draft.put(_PERIODS[name], length)
    period, policy = found["min_validation_period"], experiment.find("checkpoint_policy")
    evaluates = period if period is not None else policy
    if evaluates is not None:
        draft.put("data.eval._target_", evaluates.to(f"{MODULE}.build_eval_data"))
        draft.note("fill in", f"data.eval: replace {MODULE}.build_eval_data with your evaluation set", evaluates)
    chosen = "best" if policy is None else policy.value
    if policy is not None and chosen not in ("best", "all", "none"):
        draft.refuse(policy, "must be best, all or none", rule="enum")
    elif chosen == "all" and policy is not None:
        draft.put("checkpoint.keep", policy.to(0))
        if period is not None and found["min_checkpoint_period"] is None:
            draft.put("checkpoint.every", policy.to(period.value))
    elif chosen == "best" and (policy is not None or period is not None):
        _draft_best(experiment, policy or period)
    if chosen != "all":
        experiment.copy(f"{storage}.save_trial_latest", "checkpoint.keep")
    kept = ("save_trial_latest", "save_trial_best", "save_experiment_best")
    others = experiment.content.get(storage)
    if isinstance(others, dict) and others.keys() - set(kept):
        experiment.leave_out(storage, about="set checkpoint.dir to a folder or URL if they are not in the run's folder")


def _draft_best(experiment: _Experiment, origin: Given | None) -> None:
    draft, metric = experiment.draft, experiment.find("searcher", "metric")
    assert origin is not None
    named = str(metric.value) if metric is not None else "loss"
    own = "eval/loss" if named in ("loss", "val_loss", "validation_loss") else f"eval/{named}"
    draft.put("checkpoint.best.metric", (metric or origin).to(own))
    if metric is not None:
        draft.note("changed", f"{metric.label}: checkpoint.best.metric={own}, as evaluations of dsjob name it", metric)
    if metric is not None and own != "eval/loss":
        draft.put(("metrics", named, "_target_"), metric.to(f"{MODULE}.{named}"))
        draft.note("fill in", f"metrics.{named}: replace {MODULE}.{named} with your metric", metric)
    smaller = experiment.find("searcher", "smaller_is_better")
    if smaller is not None:
        draft.put("checkpoint.best.mode", smaller.to("max" if smaller.value is False else "min"))
    elif not falls(own):
        draft.put("checkpoint.best.mode", (metric or origin).to("min"))  # Determined's default
    count = experiment.find("checkpoint_storage", "save_trial_best")
    if count is not None and count.value != 0:
        draft.put("checkpoint.best.keep", count)


def _draft_environment(experiment: _Experiment) -> None:
    variables = experiment.find("environment", "environment_variables")
    for each in variables.value if variables is not None and isinstance(variables.value, list) else ():
        name = str(each).partition("=")[0]
        if variables is not None and name == "DET_MANUAL_INIT_DISTRIBUTED":
            function = f"{MODULE}.init_distributed"
            experiment.draft.put("launch.init_distributed._target_", variables.to(function))
            about = f"replace {function} with a function that calls torch.distributed.init_process_group"
            experiment.draft.note("fill in", f"launch.init_distributed: {about}; {_OWN_LOOP}", variables)
            continue
        experiment.draft.note("left out", f"{name}: set it for dsjob too", variables)
    whole = experiment.find("environment")
    if whole is not None and not (isinstance(whole.value, dict) and whole.value.keys() <= {"environment_variables"}):
        experiment.leave_out("environment", about=_CLUSTER)
