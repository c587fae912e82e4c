"""Advice for the user of a run: how to train longer, and what will slow it down."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from dsjob.contract.lengths import Length
from dsjob.terminal import quote_word


def train_longer(
    max_steps: int | None, max_epochs: float | None, max_length: Length | None, *, step: int, epochs: float | None
) -> str:
    """The overrides that make a run train beyond `step`, whichever of the limits it reached, for a shell.

    epochs: the passes over the data up to `step`, possibly more than `max_epochs`; None for a stream.
    """
    longer = [f"trainer.max_steps={2 * max(max_steps, step)}"] if max_steps is not None else []
    if max_epochs is not None:
        doubled = 2 * max_epochs
        longer.append(f"trainer.max_epochs={doubled if doubled > (epochs or 0) else 2 * math.ceil(epochs or 0):g}")
    if max_length is not None:
        done = {"steps": step, "epochs": epochs or 0}.get(max_length.unit, 0)
        longer.append(quote_word(f"trainer.max_length={max_length.double(done)}"))
    return " ".join(longer)


def wait_longer(callbacks: Mapping[str, Any], stopped: str) -> str:
    """The override without which a run would stop early again, for the same reason `stopped`, for a shell; empty if
    none is needed."""
    for name, callback in callbacks.items():
        metric, patience = callback.get("metric", "eval/loss"), callback.get("patience")
        if callback["_target_"] == "dsjob.callbacks.EarlyStopping" and stopped.startswith(f"{metric} "):
            more = f"+callbacks.{name}.patience=6" if patience is None else f"callbacks.{name}.patience={2 * patience}"
            return quote_word(more)
    return ""


def note_few_samples(samples: int | None, train_batch: int) -> str:
    """A note if a data set has fewer samples than a step takes; otherwise empty. `samples`: None for a stream."""
    if samples is None or samples >= train_batch:
        return ""
    have = f"{samples:,} sample{'s' * (samples > 1)}"
    return f"data.train has {have}, fewer than train_batch {train_batch:,}: every step repeats some of them"


def count_too_few_cores(launch: Mapping[str, Any]) -> int:
    """The number of CPU cores, if the job has far more ranks that compute on them; otherwise 0."""
    nproc, cores = launch["nproc"], len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    drivers = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # look for GPUs without torch, which takes seconds to import
    on_cpu = launch["device"] == "cpu" or (launch["device"] == "auto" and not any(map(os.path.exists, drivers)))
    return cores if on_cpu and cores and nproc > 2 * cores else 0
