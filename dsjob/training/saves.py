"""Saves a run's checkpoints, and handles failed saves.

If a save fails, all ranks raise the error of the first failed rank. Its folder is deleted, so that a full disk has
space again, unless the request for its commit record got no definite answer: the store may still carry it out. An
evaluation runs after the save of its step, so that an error in it cannot lose that step. Its metrics are added to the
commit record. The step is saved again only if the evaluation changed the content of state.json.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

from dsjob.checkpoint.live.committed import Saved
from dsjob.checkpoint.root.retention import Best
from dsjob.errors import CheckpointError, DsjobError, FencedError, Interrupted, Preempted, StorageError
from dsjob.training.run import Run


def is_among_best(run: Run) -> bool:
    best, progress = Best.of(run.spec.checkpoint.best), run.progress
    return best is not None and best.improves(progress.last_evaluation, progress.rated)


def save(run: Run, *, wait: bool, replace: bool = False) -> bool:
    """Saves a checkpoint; in the background with `checkpoint.async`, unless `wait`, or state is on a disk.

    Returns whether it has not failed.
    replace: overwrite an existing checkpoint of this step.
    """
    tag, metrics = _name_tag(run), _list_metrics(run)

    def begin() -> None:
        # A copy of state on a disk would fill the memory.
        if run.spec.checkpoint.async_ and not wait and not any(e.strategy.disk for e in run.engines.values()):
            run.checkpointer.save_behind(run.savable, tag=tag, metrics=metrics, replace=replace)
            run.progress.behind = tag
        else:
            _report_saved(run, run.checkpointer.save(run.savable, tag=tag, metrics=metrics, replace=replace))
        run.progress.rated.append({"tag": tag, "step": run.step, "metrics": metrics})

    with run.engine.strategy.parts("save"):
        # Only one background save may run at a time, since they share the memory for copies.
        settled = settle(run)
        if run.occasions is not None:
            run.occasions.note_settled(settled)
        return _try_saving(run, tag, begin)


def rate(run: Run) -> bool:
    """Adds the metrics of this step's evaluation to the checkpoint that was saved before it.

    Returns False if the step must be saved again: the evaluation changed buffers or plain values of the checkpoint
    (a schedule that follows the loss, the state of a metric or callback), or the metrics could not be written.
    """
    tag, metrics = _name_tag(run), _list_metrics(run)
    # A collective: every rank describes its state, and rank 0 compares the result with the last save.
    try:
        if not run.checkpointer.rate(run.savable, tag=tag, metrics=metrics, outdated=run.progress.buffers_changed):
            return False
    except (CheckpointError, StorageError) as error:
        if isinstance(error, FencedError) or run.spec.checkpoint.save_on_error == "stop":
            raise
        return False
    run.progress.rated.append({"tag": tag, "step": run.step, "metrics": metrics})
    return True


def lacks_metrics(run: Run) -> bool:
    """Whether this step's checkpoint exists without the metrics of its evaluation."""
    tag = _name_tag(run)
    return tag in run.checkpointer.tags() and all(record["tag"] != tag for record in run.checkpointer.rated())


def _name_tag(run: Run) -> str:
    return f"step-{run.step:08d}"


def _list_metrics(run: Run) -> dict[str, float]:
    """The metrics by which retention compares this step's checkpoint."""
    if run.progress.evaluated_at != run.step:
        return {}
    return {name: value for name, value in run.progress.last_evaluation.items() if math.isfinite(value)}


def settle(run: Run) -> bool | None:
    """Waits for the background save, and reports it. Returns whether it succeeded; None if there was none."""
    tag, run.progress.behind = run.progress.behind, ""

    def wait() -> None:
        saved = run.checkpointer.settle()
        if saved is not None:
            _report_saved(run, saved)

    return _try_saving(run, tag, wait) if tag else None


def _report_saved(run: Run, saved: Saved) -> None:
    run.progress.last_saved = saved.url
    for note in saved.notes:
        run.say("saved", f"{saved.tag}, but: {note}")
    run.tell("on_save", saved.url)


def _try_saving(run: Run, tag: str, action: Callable[[], None]) -> bool:
    """Runs `action`, and returns whether it succeeded. If it fails, the run ends, or with
    `checkpoint.save_on_error: warn`, tells the user."""
    try:
        action()
    except (CheckpointError, StorageError) as error:
        # A fenced run must end, whatever save_on_error says: the newer run owns the checkpoints.
        if isinstance(error, FencedError) or run.spec.checkpoint.save_on_error == "stop":
            raise
        run.progress.unsaved = f"{tag}: {error.message}"
        run.say("not saved", run.progress.unsaved + ("; training continues" if run.step < run.max_steps else ""))
        return False
    run.progress.unsaved = ""
    return True


def describe_end(run: Run, number: int, *, saved: bool) -> DsjobError:
    """The error with which a run ends that signal `number` stopped after this step."""
    newest = run.progress.last_saved
    name, at = ("Ctrl-C" if number == signal.SIGINT else "SIGTERM"), f"step {run.step}"
    if not saved:
        kept = f"the last checkpoint is {newest}" if newest else "there is no checkpoint"
        return Interrupted(number, f"stopped by {name} at {at}, which could not be saved; {kept}")
    message = f"stopped by {name} after {at}; saved {newest}"
    return Interrupted(number, message) if number == signal.SIGINT else Preempted(message)
