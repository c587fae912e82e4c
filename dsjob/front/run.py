"""`dsjob.run`: a job to its end, from a Python program, and what came of it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from dsjob.contract.environment import watch_output
from dsjob.document.sizes import read_nproc
from dsjob.errors import UsageError
from dsjob.front.execute import run_composed
from dsjob.front.process import keeping_process, require_no_group
from dsjob.front.source import Given, allowing, make_flags, read_given, telling_places
from dsjob.launch import launcher
from dsjob.run_folder import METRICS_NAME
from dsjob.trust.user import grant

_running = threading.Lock()


@dataclass(frozen=True)
class Result:
    """A run that has reached its last step.

    status: `done`; `unsaved` where `checkpoint.save_on_error: warn` let it end though its final state could not be
    saved, which `error` explains. step: the last one. metrics: the last training and evaluation metrics, by name.
    checkpoint: the newest one, None where none was made. run_dir: the run's folder. history: the records of
    metrics.jsonl, of earlier runs in the same folder too.
    """

    status: Literal["done", "unsaved"]
    step: int
    metrics: Mapping[str, float]
    checkpoint: str | None
    run_dir: str
    history: Sequence[Mapping[str, Any]]
    error: str = ""


def run(
    document: Given = None,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    trust: Sequence[str] = (),
    trust_remote_code: bool = False,
    unpinned: bool = False,
) -> Result:
    """Trains a job to its last step, as the command `dsjob run` does, and shows its progress.

    document: the path or URL of a job file, a dict, or the folder of a run, which goes on.
    recipe: the name of a recipe, in place of a document or below it.
    overrides: changes to the document, `trainer.max_steps=100`.
    config_dir: a folder with recipes of your own.
    trust, trust_remote_code, unpinned: as the flags of the command. A dict may name modules in the current folder
    and in the folder of the program.

    With one rank the job runs in this process, on this thread; with `launch.nproc=2` in processes of its own, which
    never import `__main__`. Either way the process is as before afterwards: signal handlers, environment, default
    dtype, random generators, filters of warnings and the current folder.

    Returns a Result once the last step is done. Raises DocumentError with all problems of the document at once,
    another DsjobError for what fails at run time, Preempted or Interrupted where a signal ended the run, and whatever
    the job's own code raises.
    """
    flags = make_flags(trust, trust_remote_code, unpinned)
    with _one_at_a_time(), allowing(flags), watch_output(), telling_places():
        source = read_given(document, recipe, overrides)
        composed = source.compose(config_dir)
        here = launcher.read_world_size() is not None or read_nproc(composed.document) == 1
        if here:
            require_no_group()
        with keeping_process(torch=here):
            result = run_composed(composed, grant(source.file, flags), debug=False)
    return _make_result(result)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """A run sets what the whole process has once, such as random generators: two would disturb one another."""
    if not _running.acquire(blocking=False):
        raise UsageError("a run is under way in this process", hint="wait for its end, or run in another process")
    try:
        yield
    finally:
        _running.release()


def _make_result(result: Mapping[str, Any]) -> Result:
    return Result(
        status=result["status"],
        step=result["step"],
        metrics=result["metrics"],
        checkpoint=result["checkpoint"],
        run_dir=result["run_dir"],
        history=_read_history(result["run_dir"]),
        error=result.get("error", ""),
    )


def _read_history(run_dir: str) -> list[dict[str, Any]]:
    path = os.path.join(run_dir, METRICS_NAME)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
