"""`dsjob.run`: trains a job from a Python program, and returns its result."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dsjob.contract.masked_output import watch_output
from dsjob.document.sizes import read_nproc
from dsjob.errors import DsjobError, UsageError
from dsjob.front.execute import run_composed
from dsjob.front.process import keeping_process, require_no_group
from dsjob.front.source import Given, allowing, make_flags, read_given, telling_places
from dsjob.launch import launcher
from dsjob.run_folder import METRICS_NAME
from dsjob.trust.frames import TRACEBACK_HINT
from dsjob.trust.user import grant

if TYPE_CHECKING:
    from dsjob.training.trainer import Trainer

_running = threading.Lock()


@dataclass(frozen=True)
class Result:
    """The result of a run that has reached its last step, or that a callback or the file `stop-now` has stopped.

    status: `done`, or `unsaved` if the final state could not be saved and `checkpoint.save_on_error: warn` let the run
    finish; `error` then says why. step: the last step. metrics: the last training and evaluation metrics, by name.
    checkpoint: the newest checkpoint; None if there is none. run_dir: the run's folder. history: the records of
    metrics.jsonl, including those of earlier runs in the same folder. stopped: why the run was stopped before its last
    step; empty if it was not. best_step: with `checkpoint.load_best_at_end`, the step of the best checkpoint, which
    `checkpoint` and the evaluation's metrics are of; otherwise None.
    """

    status: Literal["done", "unsaved"]
    step: int
    metrics: Mapping[str, float]
    checkpoint: str | None
    run_dir: str
    history: Sequence[Mapping[str, Any]] = field(repr=False)
    error: str = ""
    stopped: str = ""
    best_step: int | None = None


def run(
    document: Given = None,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    trust: Sequence[str] = (),
    trust_remote_code: bool = False,
    unpinned: bool = False,
    smoke: bool = False,
    trainer: type[Trainer] | None = None,
) -> Result:
    """Trains a job to its last step, like the command `dsjob run`, and shows its progress.

    document: the path or URL of a job file, a dict, or the folder of a run to resume.
    recipe: the name of a recipe, used instead of a document or as its base.
    overrides: changes to the document, such as `trainer.max_steps=100`.
    config_dir: a folder with your own recipes.
    trust, trust_remote_code, unpinned: as the flags of the command. A dict may name modules in the current folder
    and in the folder of the program.
    smoke: first try a few steps, an evaluation, a save, a resume and a conversion in a temporary folder.
    trainer: a class derived from dsjob.Trainer, whose methods replace parts of the job (`trainer.parts`).
    It must be importable, so it cannot be in the program itself. Its module is trusted.

    With one rank the job runs in this process, on this thread. With several (`launch.nproc=2`) it runs in child
    processes, which never import `__main__`. Afterwards the state of this process is restored: signal handlers,
    environment, default dtype, random generators, warning filters and the current folder.

    Returns a Result after the last step. Raises DocumentError with all problems of the document at once, another
    DsjobError for failures at run time, Preempted or Interrupted if a signal ended the run, and any exception of the
    job's own code.
    """
    if trainer is not None:
        path = _name_class(trainer)
        overrides, trust = [*overrides, f"++trainer.parts._target_={path}"], [*trust, path]
    flags = make_flags(trust, trust_remote_code, unpinned)
    with one_at_a_time(), allowing(flags), watch_output(), telling_places():
        source = read_given(document, recipe, overrides)
        composed = source.compose_known(config_dir)
        here = launcher.read_world_size() is not None or read_nproc(composed.document) == 1
        if here:
            require_no_group()
        with keeping_process(torch=here), naming_no_flags(here):
            result = run_composed(composed, grant(source.file, flags), debug=False, smoke="first" if smoke else "")
    return _make_result(result)


def _name_class(trainer: object) -> str:
    """The dotted path of a Trainer class. Raises UsageError if ranks cannot import it."""
    bases = getattr(trainer, "__mro__", ())
    if not isinstance(trainer, type) or not any(base.__module__ == "dsjob.training.trainer" for base in bases):
        found = trainer.__name__ if isinstance(trainer, type) else f"a {type(trainer).__name__}"
        message = f"trainer is {found}, not a class derived from dsjob.Trainer"
        raise UsageError(message, hint="pass the class itself: trainer=MyTrainer")
    if "<locals>" in trainer.__qualname__ or trainer.__module__ == "__main__":
        where = "in the program itself" if trainer.__module__ == "__main__" else "inside a function"
        message = f"{trainer.__name__} is defined {where}, where ranks cannot import it"
        raise UsageError(message, hint="define it at the top level of a module, and import it from there")
    return f"{trainer.__module__}.{trainer.__qualname__}"


@contextmanager
def naming_no_flags(here: bool) -> Iterator[None]:
    """Removes the flag --debug from hints. In this process (`here`) Python shows the traceback anyway."""
    try:
        yield
    except DsjobError as error:
        error.hint = error.hint.replace(TRACEBACK_HINT, "" if here else "set launch.nproc=1 to see the traceback")
        raise


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Allows one run at a time: runs change process-wide state, such as random generators."""
    if not _running.acquire(blocking=False):
        raise UsageError("a run is under way in this process", hint="wait until it ends, or start another process")
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
        stopped=result.get("stopped", ""),
        best_step=result.get("best_step"),
    )


def _read_history(run_dir: str) -> list[dict[str, Any]]:
    path = os.path.join(run_dir, METRICS_NAME)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
