"""Saving a run: whether a checkpoint is due, making it, and what a failure of that means."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

from dsjob.checkpoint.committed import Saved
from dsjob.checkpoint.retention import Best
from dsjob.errors import CheckpointError, DsjobError, FencedError, Interrupted, Preempted, StorageError
from dsjob.occasions import crosses
from dsjob.training import Run

SECONDS_TO_SETTLE = 60.0  # what a save in the background gets where a run ends with an error


def ends_period(run: Run, seen: int) -> bool:
    """Whether this step, which began after `seen` samples, completes one more of checkpoint.every_epochs."""
    every, length = run.spec.checkpoint.every_epochs, run.loader.samples_per_epoch
    return bool(every and length) and crosses(every * length, seen, run.engine.global_samples)  # type: ignore[operator]


def is_among_best(run: Run) -> bool:
    best = run.spec.checkpoint.best
    return best is not None and Best(best.metric, best.mode, best.keep).improves(run.last_evaluation, run.rated)


def save(run: Run, *, wait: bool) -> bool:
    """Saves, behind training where that is asked for and there is no need to `wait`; whether it has not failed."""
    tag = f"step-{run.step:08d}"
    metrics = {n: v for n, v in run.last_evaluation.items() if run.evaluated_at == run.step and math.isfinite(v)}

    def begin() -> None:
        if run.spec.checkpoint.async_ and not wait:
            run.checkpointer.save_behind(run.savable, tag=tag, metrics=metrics)
            run.behind = tag
        else:
            _tell_saved(run, run.checkpointer.save(run.savable, tag=tag, metrics=metrics))
        run.rated.append({"tag": tag, "step": run.step, "metrics": metrics})

    settled = settle(run)
    if run.occasions is not None:
        run.occasions.note_settled(settled)
    return _try_saving(run, tag, begin)


def settle(run: Run) -> bool | None:
    """Waits for a save in the background and tells how it ended: whether it has not failed; None without one."""
    tag, run.behind = run.behind, ""

    def wait() -> None:
        saved = run.checkpointer.settle()
        if saved is not None:
            _tell_saved(run, saved)

    return _try_saving(run, tag, wait) if tag else None


def _tell_saved(run: Run, saved: Saved) -> None:
    run.last_saved = saved.url
    for note in saved.notes:
        run.say("saved", f"{saved.tag}, but: {note}")
    run.tell("on_save", saved.url)


def _try_saving(run: Run, tag: str, action: Callable[[], None]) -> bool:
    """Whether `action` saved; where it failed, the run ends, or is told of it, as checkpoint.save_on_error says."""
    try:
        action()
    except (CheckpointError, StorageError) as error:
        if isinstance(error, FencedError) or run.spec.checkpoint.save_on_error == "stop":
            raise
        run.say("not saved", f"{tag}: {error.message}; training goes on")
        return False
    return True


def describe_end(run: Run, saved: bool) -> DsjobError:
    if not saved:
        return Interrupted(signal.SIGTERM, f"stopped by SIGTERM at step {run.step}, which could not be saved")
    message = f"stopped by SIGTERM after step {run.step}, which is saved: {run.last_saved}"
    return Preempted(message, hint="run it again to go on from there")
