"""The lengths of a job, and the steps that they stand for."""

from __future__ import annotations

from collections.abc import Iterator

from dsjob.contract.lengths import Length
from dsjob.contract.paths import Path
from dsjob.contract.spec import JobSpec


def list_lengths(spec: JobSpec) -> dict[Path, Length]:
    """All lengths of a job by their place."""
    trainer = spec.trainer
    found: dict[Path, Length | None] = {
        ("trainer", "max_length"): trainer.max_length,
        ("trainer", "log_every"): trainer.log_every,
        ("trainer", "eval_every"): trainer.eval_every,
        ("checkpoint", "every"): spec.checkpoint.every,
    }
    return {place: length for place, length in found.items() if length is not None}


def describe_lengths(spec: JobSpec, samples: int | None, tokens: int) -> Iterator[tuple[str, str]]:
    """Each length with a unit by its key, and the steps that it stands for. samples: of an epoch; None for a stream.
    tokens: of a step, as far as known."""
    batch = spec.trainer.train_batch
    for place, length in list_lengths(spec).items():
        about = ""
        if length.unit == "seconds":
            about = ": wall-clock time"
        elif length.unit == "tokens":
            about = f": about {length.amount / tokens:,.4g} steps of {tokens:,} tokens" if tokens else ""
        elif length.unit == "steps":
            about = f": {length.amount:,.6g} step{'s' * (length.amount != 1)}"
        else:
            amount = length.amount * (samples or 0 if length.unit == "epochs" else 1)
            about = f": {amount / batch:,.6g} steps of {batch:,} samples" if amount else ""
        if length.text.isdigit():
            continue
        yield ".".join(map(str, place)), f"{length}{about}"
