"""The smoke run: tries a whole job on a few steps in a temporary folder, on its own ranks, before the job starts.

It is the job itself with a few values changed, started twice: the second start resumes from what the first one saved.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from dsjob.contract.resolved import ResolvedJob
from dsjob.document.resolve import complete_job
from dsjob.errors import DsjobError, UsageError
from dsjob.files import keep_only, temporary_folder
from dsjob.front.weights import convert
from dsjob.launch.launcher import is_first
from dsjob.run_folder import LOGS_NAME, METRICS_NAME
from dsjob.terminal import print_error, print_lines
from dsjob.training.form import read_form, showing

_STEPS = 2  # of the first start; the second start takes one more
_BATCHES = 4  # of each evaluation and each prediction
Start = Callable[[ResolvedJob, str], dict[str, Any]]


@dataclass(frozen=True)
class Tried:
    """What a smoke run has done. steps: seconds of each training step. saved: bytes of the checkpoint."""

    parts: list[str]
    steps: list[float]
    saved: int
    seconds: float


def try_job(document: Mapping[str, Any], start: Start) -> None:
    """Trains, evaluates, predicts, saves, resumes and converts a job in a temporary folder, and prints what was tried.

    document: a resolved one. start: runs a job in a folder, and returns its result. Raises the errors of a run. Then
    the folder's logs are kept if the error refers to them.
    """
    if "train" not in document["tasks"]:
        raise UsageError("a smoke run tries training, but this job does not train", hint="leave --smoke out")
    # On several nodes, all ranks use rank 0's folder.
    doing = ["training"]
    try:
        with temporary_folder("smoke") if is_first() else nullcontext("") as folder, _telling(folder, doing):
            tried = _try_parts(document, start, folder, doing)
    finally:
        _free_memory()
    if tried is not None and read_form() != "quiet":
        _show(tried)


def _try_parts(document: Mapping[str, Any], start: Start, folder: str, doing: list[str]) -> Tried | None:
    """None on ranks that do not print."""
    begun = time.monotonic()
    with showing("quiet"):
        result = start(_make_trial(document, folder, _STEPS), folder)
        doing[0] = "resuming"
        resumed = start(_make_trial(document, folder, 1, resume="required"), folder)
    if not is_first():
        return None
    run_dir = resumed["run_dir"]
    doing[0] = "converting"
    forms = ["fp32", *(["hf"] if result.get("pretrained") else [])]
    for form in forms:
        convert(run_dir, os.path.join(run_dir, f"converted-{form}"), to=form)  # type: ignore[arg-type]
    with open(os.path.join(run_dir, METRICS_NAME), encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    seconds = [document["trainer"]["train_batch"] / each["samples_per_second"] for each in records if "loss" in each]
    evaluated = [name for name in resumed["metrics"] if "/" in name]
    parts = [
        f"{result['step']} step{'s' * (result['step'] > 1)}",
        *([f"an evaluation ({', '.join(evaluated)})"] if evaluated else []),
        *(["predictions"] if result["predictions"] else []),
        "a save",
        f"a resume to step {resumed['step']}",
        f"a conversion to {' and '.join(forms)}",
    ]
    return Tried(parts, seconds, _measure(resumed["checkpoint"]), time.monotonic() - begun)


def _make_trial(document: Mapping[str, Any], folder: str, steps: int, resume: str = "") -> ResolvedJob:
    """The job for `steps` steps in `folder`. It starts from another job's checkpoint if the job does."""
    trial = deepcopy(dict(document))
    trainer, checkpoint = trial["trainer"], trial["checkpoint"]
    trainer |= {"log_every": 1, "eval_every": 0, "eval_at_start": False}
    trainer["eval_batches"] = min(trainer.get("eval_batches") or _BATCHES, _BATCHES)
    elsewhere = checkpoint["resume"] if "/" in checkpoint["resume"] else "never"
    checkpoint |= {"dir": None, "every": 0, "every_minutes": None, "every_epochs": None, "at_end": True}
    checkpoint |= {"resume": resume or elsewhere, "save_on_error": "stop"}
    # After all of the job's own callbacks, so that they see these steps whole.
    trial["callbacks"] = {
        **trial.get("callbacks", {}),
        "smoke run": {"_target_": "dsjob.callbacks.StopAfter", "steps": steps},
    }
    predict = trial["predict"]
    predict |= {"dir": None, "batches": min(predict.get("batches") or _BATCHES, _BATCHES)}
    trial |= {"monitor": {}, "output": {"dir": folder}}
    return complete_job(trial)


@contextmanager
def _telling(folder: str, doing: list[str]) -> Iterator[None]:
    """Tells of an error in the block, and keeps the folder's logs if the error names them."""
    try:
        yield
    except BaseException as error:
        if is_first():
            print_error(f"dsjob: the smoke run failed while {doing[0]}; nothing was started")
        told = f"{error.message} {error.hint}" if isinstance(error, DsjobError) else str(error)
        if folder and os.path.join(folder, LOGS_NAME) in told:
            keep_only(folder, LOGS_NAME)
        raise


def _measure(folder: str) -> int:
    """The bytes of all files below a folder."""
    return sum(os.path.getsize(os.path.join(place, name)) for place, _, files in os.walk(folder) for name in files)


def _free_memory() -> None:
    """Frees what runs in this process leave to Python's garbage collector."""
    if (torch := sys.modules.get("torch")) is not None:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _show(tried: Tried) -> None:
    first, *later = tried.steps
    if read_form() == "json":
        values = {
            "tried": tried.parts,
            "step_seconds": tried.steps,
            "saved_bytes": tried.saved,
            "seconds": tried.seconds,
        }
        print_lines(json.dumps({"event": "smoke", **values}))
        return
    print_lines(f"smoke run  done in {tried.seconds:.0f} s: {', '.join(tried.parts)}")
    warm = f"{min(later):.3g} s (the first one {first:.3g} s)" if later else f"{first:.3g} s"
    print_lines(f"smoke run  a step took {warm}; a checkpoint has {tried.saved:,} bytes; it was deleted")
