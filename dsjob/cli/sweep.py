"""`dsjob -m`: a sweep of jobs with Hydra's multirun, and the table of its results."""

from __future__ import annotations

import math
import os
import uuid
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from dsjob.cli.flags import allow_granted
from dsjob.contract.directions import falls
from dsjob.contract.masking import mask
from dsjob.contract.rules import RULES
from dsjob.document import Document
from dsjob.document import compose as composition
from dsjob.document.origins import Composed, read_document
from dsjob.document.overrides import require_few_runs
from dsjob.document.places import place_problems
from dsjob.errors import (
    ContractError,
    DocumentError,
    DsjobError,
    Interrupted,
    LaunchError,
    Preempted,
    Problem,
    UsageError,
)
from dsjob.files import temporary_folder
from dsjob.front.execute import check_runnable, run_composed
from dsjob.front.source import quote
from dsjob.launch import launcher
from dsjob.run_folder import RESULT_NAME, make_run_dir, read_result, write_result
from dsjob.terminal import print_error, print_lines, print_text, print_traceback
from dsjob.trust.frames import describe_failure
from dsjob.trust.grant import Trust
from dsjob.trust.user import read_environment

# Settings of the sweep are passed to its runs through the environment, because Hydra's launchers may start the runs in
# other processes.
_ID_VARIABLE, _TRUST_VARIABLE = "DSJOB_SWEEP_ID", "DSJOB_SWEEP_TRUST"
_ONE_RUN = "note: no key has several values, so this sweep is one run; for several: optimizer.params.lr=1e-3,3e-4"
_OPTUNA = "hydra/sweeper=optuna"
_FILE_VARIABLE, _DEBUG_VARIABLE, _DIR_VARIABLE = "DSJOB_SWEEP_FILE", "DSJOB_SWEEP_DEBUG", "DSJOB_SWEEP_DIR"


def main(overrides: list[str], file: Document | None, config_dir: str | None, debug: bool, trust: Trust) -> int:
    """Runs a sweep; the exit code is 1 if any run failed.

    Under torchrun or srun, every rank runs the sweep, but only rank 0's folders, results and exit code count. The other
    ranks work in temporary folders.
    """
    samples = any(override.startswith("hydra/sweeper=") for override in overrides)
    if not samples:
        count = composition.count_runs(overrides)
        require_few_runs(count)
        if count == 1 and launcher.is_first():
            print_error(_ONE_RUN)
    _refuse_secrets(overrides)
    each = composition.take_first(overrides)
    first = composition.compose(each, file=file, config_dir=config_dir, environment=read_environment())
    _refuse_secrets_composed(first)
    if samples:
        check_runnable(first, trust)  # its folder is created next
    else:
        _check_each(overrides, file, config_dir, trust)
    os.environ[_ID_VARIABLE] = uuid.uuid4().hex
    os.environ[_TRUST_VARIABLE] = trust.to_text()
    os.environ[_FILE_VARIABLE] = file.source if file is not None else ""
    os.environ[_DEBUG_VARIABLE] = "1" if debug else ""
    chosen = _settle_optuna(overrides, first.document)
    if not launcher.is_first():
        overrides = [override for override in overrides if not override.startswith("hydra.sweep.dir=")]
        with temporary_folder() as aside:
            chosen.append(f"hydra.sweep.dir={quote(aside)}")
            composition.multirun(run_one, [*overrides, *chosen], file=file, config_dir=config_dir)
        return 0
    folder = _choose_folder(overrides, first.document)
    if folder is not None:
        chosen.append(f"hydra.sweep.dir={quote(folder)}")
    try:
        composition.multirun(run_one, [*overrides, *chosen], file=file, config_dir=config_dir)
    except UsageError:  # also raised when Optuna completed no trial, in which case failed runs are still shown
        folder = folder or os.environ.get(_DIR_VARIABLE)
        if folder is None or not _collect(folder):
            raise
    folder = folder or os.environ[_DIR_VARIABLE]
    results = _collect(folder)
    if not results:
        raise LaunchError(f"no run of the sweep left a result in {folder}")
    _print_table(folder, results)
    return 0 if all(entry["status"] == "done" for entry in results.values()) else 1


def _settle_optuna(overrides: list[str], document: dict[str, Any]) -> list[str]:
    """Overrides for Optuna's sweeper: the direction of the objective, and that failed trials do not end the study.

    Raises UsageError if the document and `hydra.sweeper.direction` contradict each other.
    """
    if _OPTUNA not in overrides:
        return []
    given = {override.partition("=")[0]: override.partition("=")[2] for override in overrides}
    best = document.get("checkpoint", {}).get("best") or {}
    mode = best.get("mode") or ("min" if falls(str(best.get("metric", "eval/loss"))) else "")
    direction = given.get("hydra.sweeper.direction", "")
    if not mode and not direction:
        message = f"Optuna has to know whether lower or higher values of {best['metric']} are better"
        raise UsageError(message, hint="set checkpoint.best.mode=max, or min")
    meant = {"min": "minimize", "max": "maximize"}.get(mode, direction)
    if best and direction in ("minimize", "maximize") and direction != meant:
        raise UsageError(
            f"hydra.sweeper.direction={direction} contradicts checkpoint.best.mode: {mode}",
            hint=f"leave it out, or set checkpoint.best.mode={direction[:3]}",
        )
    chosen = {"hydra.sweeper.direction": meant, "hydra.sweeper.max_failure_rate": "1"}
    return [f"{key}={value}" for key, value in chosen.items() if key not in given]


def _read_objective(document: dict[str, Any], result: dict[str, Any]) -> float:
    """The number by which sweepers compare runs: the last value of checkpoint.best.metric (with `load_best_at_end`,
    the best one); if that is not set, of the evaluation loss; without evaluations, of the training loss. Raises
    ContractError if the run has no such metric."""
    metrics = result.get("metrics", {})
    best = document.get("checkpoint", {}).get("best")
    name = best.get("metric", "eval/loss") if best else "eval/loss" if "eval/loss" in metrics else "loss"
    if name not in metrics:
        raise ContractError(f"the run reported no {name}, but the sweep compares runs by it (checkpoint.best.metric)")
    return float(metrics[name])


def _refuse_secrets(overrides: list[str]) -> None:
    """Raises DocumentError for secrets in the overrides of any run, before Hydra prints and saves the overrides."""
    hint = "put it in an environment variable and write KEY='${oc.env:NAME}'"
    problems = [
        Problem("is refused: overrides may not contain secrets", path, "secret-in-document", hint, "command line")
        for path in composition.find_literal_secrets(overrides)
    ]
    if problems:
        raise DocumentError(problems)


def _refuse_secrets_composed(first: Composed) -> None:
    """Raises DocumentError for secrets in the first run's composed document, which the other runs most likely share."""
    found = [*RULES["secret-in-document"].find(first.document), *RULES["secret-in-url"].find(first.document)]
    if problems := place_problems(found, first.locate):
        raise DocumentError(problems)


def _check_each(overrides: list[str], file: Document | None, config_dir: str | None, trust: Trust) -> None:
    """Raises DocumentError for all values of a sweep that a run would refuse, before the first run starts."""
    problems: dict[str, Problem] = {}
    for each in composition.take_each(overrides):
        try:
            check_runnable(
                composition.compose(each, file=file, config_dir=config_dir, environment=read_environment()), trust
            )
        except DocumentError as error:
            problems.update((str(problem), problem) for problem in error.problems)
    if problems:
        raise DocumentError(list(problems.values()))


def _choose_folder(overrides: list[str], document: dict[str, Any]) -> str | None:
    """The folder of the sweep: the one that a single run would use, with numbered folders for the runs below it.

    None if the user has set hydra.sweep.dir, which Hydra resolves later.
    """
    if any(override.startswith("hydra.sweep.dir=") for override in overrides):
        return None
    pattern = document.get("output", {}).get("dir", "outputs/%name/%time")
    return make_run_dir(pattern, document["name"])


def run_one(config: DictConfig) -> float:
    """One run of a sweep, called by Hydra's launchers, possibly in another process. Returns the sweeper's objective.

    A run that fails is recorded and returns nan, so that sweeper and launcher continue with the next one.
    """
    hydra = HydraConfig.get()
    run_dir = os.path.relpath(hydra.runtime.output_dir)
    os.environ[_DIR_VARIABLE] = os.path.relpath(hydra.sweep.dir)
    with open_dict(config):
        config.hydra = hydra
    trust = Trust.from_text(os.environ[_TRUST_VARIABLE])
    allow_granted(trust.prefixes)
    given = cast("list[str]", OmegaConf.to_container(hydra.overrides.task, resolve=False))
    shown = [override for override in given if not override.startswith("+job_file=")]
    if launcher.is_first():
        print_lines("", f"== run {hydra.job.num}{': ' * bool(shown)}{' '.join(shown)}")
    before = read_result(run_dir).get("overrides", shown)
    if before != shown:  # it would resume a run with other values
        found = f"{run_dir} holds the run with {' '.join(before)}"
        print_error(f"dsjob: error: {UsageError(found, hint='choose another output.dir, or leave it out')}")
        raise SystemExit(2)  # after an Exception, Hydra would continue with the next run
    try:
        source = os.environ.get(_FILE_VARIABLE)
        composed = composition.finish(config, read_document(source) if source else None, read_environment())
        result = run_composed(composed, trust, bool(os.environ.get(_DEBUG_VARIABLE)), run_dir=run_dir)
        objective = _read_objective(composed.document, result) if launcher.is_first() else 0.0
    except (Interrupted, Preempted) as error:
        print_error(f"dsjob: {error}")
        raise SystemExit(error.exit_code) from error  # after an Exception, Hydra would continue with the next run
    except Exception as error:
        known = isinstance(error, DsjobError)
        message = mask(str(error) if known else describe_failure(error))
        if not known and os.environ.get(_DEBUG_VARIABLE):
            print_traceback(error)
        print_error(f"dsjob: error: {message}")
        _write(run_dir, {"status": "failed", "error": message, "overrides": shown})
        if hydra.runtime.choices.get("hydra/sweeper") == "optuna":
            raise  # Optuna counts the trial as failed, whereas nan would stop the study
        return math.nan
    _write(run_dir, {**result, "overrides": shown})
    return objective


def _write(run_dir: str, result: dict[str, Any]) -> None:
    write_result(run_dir, {**result, "sweep": os.environ.get(_ID_VARIABLE)})


def _collect(folder: str) -> dict[str, dict[str, Any]]:
    """The results of this sweep's runs, by the names of their folders in the sweep's folder."""
    found = {}
    for root, _, files in sorted(os.walk(folder)):
        result = read_result(root) if RESULT_NAME in files else {}
        if result.get("sweep") == os.environ[_ID_VARIABLE]:
            found[os.path.relpath(root, folder)] = result
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def _print_table(folder: str, results: dict[str, dict[str, Any]]) -> None:
    """Prints a row per run: the overrides that differ between runs, the status, the last metrics. Then the errors."""
    from dsjob.console import Console, Table

    console = Console()
    names = list(dict.fromkeys(name for entry in results.values() for name in entry.get("metrics", {}) if name != "lr"))
    common = set.intersection(*(set(entry["overrides"]) for entry in results.values()))
    table = Table(f"sweep {folder}")
    for column in ("run", "overrides", "status", "step", *names):
        table.add_column(column, overflow="fold")
    for run, entry in results.items():
        metrics = entry.get("metrics", {})
        values = [f"{metrics[name]:.4f}" if name in metrics else "" for name in names]
        own = " ".join(override for override in entry["overrides"] if override not in common)
        table.add_row(run, own, entry["status"], str(entry.get("step", "")), *values)
    console.print(table)
    for run, entry in results.items():
        if "error" in entry:
            print_text(f"run {run} {entry['status']}: {entry['error']}")
