"""`dsjob -m`: Hydra's multirun of jobs, and the table of what came of them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from dsjob import compose as composition
from dsjob import launch, storage
from dsjob.cli.run import import_folders, read_result, run_composed
from dsjob.document import Document
from dsjob.errors import DocumentError, DsjobError, Interrupted

_FOLDERS_VARIABLE = "DSJOB_SWEEP_FOLDERS"
_DEBUG_VARIABLE = "DSJOB_SWEEP_DEBUG"


def main(overrides: list[str], file: Document | None, config_dir: str | None, debug: bool) -> int:
    """Sweeps; the exit code is 1 if any run failed."""
    folder = _make_folder(overrides, file, config_dir)
    os.environ[_FOLDERS_VARIABLE] = os.pathsep.join(import_folders(file))
    os.environ[_DEBUG_VARIABLE] = "1" if debug else ""
    chosen = [] if any(o.startswith("hydra.sweep.dir=") for o in overrides) else [f"hydra.sweep.dir='{folder}'"]
    failure: BaseException | None = None
    try:
        composition.multirun(run_one, [*overrides, *chosen], file=file, config_dir=config_dir)
    except (DocumentError, Interrupted, KeyboardInterrupt):
        raise
    except Exception as error:
        failure = error
    results = _collect(folder)
    if not results and failure is not None:
        raise failure
    _print_table(folder, results)
    return 1 if failure is not None or any(entry.get("status") != "done" for entry in results.values()) else 0


def _make_folder(overrides: list[str], file: Document | None, config_dir: str | None) -> str:
    """The folder of the sweep: where a single run would put its output; the runs are numbered below it."""
    given = [o.split("=", 1)[1] for o in overrides if o.startswith("hydra.sweep.dir=")]
    if given:
        return given[-1].strip("'\"")
    first = [override.split(",")[0] if "," in override else override for override in overrides]
    composed = composition.compose(first, file=file, config_dir=config_dir)
    pattern = composed.document.get("output", {}).get("dir", "outputs/{name}/{time}")
    return launch.make_run_dir(pattern, composed.document["name"])


def run_one(config: DictConfig) -> float | None:
    """One run of a sweep, as Hydra's launchers call it, maybe in another process; returns what sweepers minimise."""
    hydra = HydraConfig.get()
    run_dir: str = hydra.runtime.output_dir
    with open_dict(config):
        config.hydra = hydra
    folders = [folder for folder in os.environ.get(_FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
    told = " ".join(override for override in hydra.overrides.task if not override.startswith("+job_file="))
    print(f"\n== run {hydra.job.num}: {told}", flush=True)  # noqa: T201
    try:
        composed = composition.finish(config, None)
        result = run_composed(composed, folders, bool(os.environ.get(_DEBUG_VARIABLE)), run_dir=run_dir)
    except Exception as error:
        known = isinstance(error, DsjobError)
        message = str(error) if known else launch.describe_failure(error)
        if not known and os.environ.get(_DEBUG_VARIABLE):
            traceback.print_exc()
        print(f"dsjob: error: {message}", file=sys.stderr, flush=True)  # noqa: T201
        _write(run_dir, {"status": "failed", "error": message.splitlines()[0], "overrides": told})
        raise
    _write(run_dir, {**result, "overrides": told})
    metrics = result.get("metrics", {})
    objective: float | None = metrics.get("eval/loss", metrics.get("loss"))
    return objective


def _write(run_dir: str, result: dict[str, Any]) -> None:
    storage.write_bytes(os.path.join(run_dir, "result.json"), json.dumps(result).encode())


def _collect(folder: str) -> dict[str, dict[str, Any]]:
    """The results of all runs below the sweep's folder, by the name of theirs."""
    found = {}
    for root, _, files in sorted(os.walk(folder)):
        if "result.json" in files:
            found[os.path.relpath(root, folder)] = read_result(root)
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def _print_table(folder: str, results: dict[str, dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for entry in results.values() for name in entry.get("metrics", {}) if name != "lr"))
    table = Table(title=f"sweep {folder}", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("run", "overrides", "status", "step", *names):
        table.add_column(column, overflow="fold")
    for run, entry in results.items():
        metrics = entry.get("metrics", {})
        values = [f"{metrics[name]:.4f}" if name in metrics else "" for name in names]
        status = entry["status"] if entry["status"] == "done" else f"failed: {entry.get('error', '')}"
        table.add_row(run, entry.get("overrides", ""), status, str(entry.get("step", "")), *values)
    Console(highlight=False).print(table)
