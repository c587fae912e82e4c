"""Chooses the number of ranks to resolve a document for, and resolves its batch sizes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

from dsjob.contract import deepspeed_keys
from dsjob.contract.batch import BatchSizes
from dsjob.contract.gpus import read_gpus
from dsjob.contract.model_ranks import KEYS, count_model_ranks, read_sizes
from dsjob.contract.paths import Path, get_at
from dsjob.document.places import Locate, Place, describe_place
from dsjob.errors import DocumentError, Problem, UsageError

_TRIAD = ("train_batch", "micro_batch", "grad_accum")


def read_nproc(document: dict[str, Any]) -> int:
    """The ranks that a document, which need not be valid, starts: `launch.nproc`, or one for each GPU that
    `launch.include` names; otherwise 1."""
    section = document.get("launch")
    section = section if isinstance(section, dict) else {}
    nproc = section.get("nproc", count_included(section.get("include")))
    return int(nproc) if isinstance(nproc, (int, float)) and 1 <= nproc < math.inf else 1


def count_included(include: Any) -> int | None:
    """The number of GPUs that `launch.include` names; None if it names none, or cannot be read."""
    try:
        named = read_gpus(include, "") if isinstance(include, (str, list)) else None
    except (UsageError, TypeError):
        return None
    return len(named) if named else None


def choose_world_size(
    document: dict[str, Any], locate: Locate, *, asked: int | None = None, started: int | None = None
) -> tuple[int, str]:
    """The number of ranks to resolve a document for, and the source of that number.

    `asked`: set by a flag; `started`: started by torchrun or srun. A resolved document keeps its number of ranks, which
    under torchrun may exceed launch.nproc, unless the command line sets launch.nproc.
    """
    if asked or started:
        return (asked, "--world-size") if asked else (started or 1, "ranks that were started")
    before = get_at(document, ("resolved", "world_size"))
    if isinstance(before, int) and before > 0 and not locate(("launch", "nproc"))[0].startswith("command line"):
        return before, "what it was resolved for"
    return read_nproc(document), "launch.nproc"


@dataclass(frozen=True)
class Ranks:
    """The number of ranks, and its source. `parts`: ranks that hold one model together; `split_by`: the keys that say
    so."""

    count: int
    told_by: str = ""
    parts: int = 1
    split_by: str = ""

    @property
    def data(self) -> int:
        """The number of data-parallel ranks, which read different data."""
        return self.count // self.parts

    def describe(self) -> str:
        """The source of the number of data-parallel ranks."""
        return self.told_by if self.parts == 1 else f"{self.count} ranks / {self.split_by}"

    @classmethod
    def of_job(cls, job: dict[str, Any], count: int, told_by: str = "") -> Ranks:
        """The ranks of a job, which need not be valid."""
        sizes = read_sizes(job)
        named = " / ".join(f"{'.'.join(map(str, path))} {size}" for path, size in sizes.items())
        return cls(count, told_by, count_model_ranks(job), named)


def check_parts(job: dict[str, Any], world_size: int, ranks_from: str) -> list[Problem]:
    """A problem if the ranks do not divide into groups that hold one model."""
    parts = count_model_ranks(job)
    if world_size % parts == 0:
        return []
    told = f" ({ranks_from})" if ranks_from else ""
    ranks, verb = ("ranks", "do") if world_size > 1 else ("rank", "does")
    message = f"{world_size} {ranks}{told} {verb} not divide into groups of {parts}"
    hint = f"start {parts * max(1, world_size // parts)} ranks, or another multiple of {parts}"
    return [Problem(message, next(iter(read_sizes(job))), "model-ranks", hint)]


def leave_sizes_open(problems: list[Problem]) -> bool:
    """Whether problems of a job keep its batch sizes from being resolved."""
    touched: list[Path] = [*KEYS, ("pipeline", "micro_batches")]
    for key in deepspeed_keys.BATCH_KEYS:
        touched += [(key,), ("deepspeed", key), deepspeed_keys.to_job_path((key,))[1:]]
    return any(p.severity == "error" and (p.path in touched or _leaves_sizes_open(p)) for p in problems)


def _leaves_sizes_open(problem: Problem) -> bool:
    """Whether a problem of the trainer section affects batch sizes: one of them is invalid or misspelled."""
    if problem.path[:1] != ("trainer",):
        return problem.path == ()
    names = ("train_batch", "micro_batch", "grad_accum")
    meant = problem.hint if problem.hint.startswith("did you mean") else ""
    return len(problem.path) == 1 or problem.path[1] in names or any(name in meant for name in names)


def settle_sizes(
    trainer: dict[str, Any], ranks: Ranks, before: Any, locate: Locate, locate_origin: Locate
) -> BatchSizes:
    """Resolves the batch sizes of a normalised `trainer` section for these ranks.

    `before`: the section `resolved`, if the document was resolved before. Raises DocumentError.
    """
    asked = _reopen(trainer, ranks, before, locate)

    def tell(key: str) -> str:
        return _tell_origin(getattr(asked, key), trainer.get(key), locate_origin(("trainer", key)))

    try:
        return asked.resolve(ranks.data, name=tell, ranks=ranks.describe(), parts=ranks.parts)
    except DocumentError as error:
        named = [key for key in _TRIAD if key in trainer]
        if [trainer[key] for key in named if key != "grad_accum"] in (["auto"], ["auto", "auto"]):
            told = '"auto" is derived from train_batch or micro_batch, but neither is a number'
            hint = "for example trainer.micro_batch=8"
            error = DocumentError([replace(found, message=told, hint=hint) for found in error.problems])
        raise DocumentError([replace(found, path=("trainer", *named[:1])) for found in error.problems]) from error


def _reopen(trainer: dict[str, Any], ranks: Ranks, before: Any, locate: Locate) -> BatchSizes:
    """The requested batch sizes, without those that were derived when the document was resolved before."""
    asked = BatchSizes.of_trainer(trainer)
    if not isinstance(before, dict) or "world_size" not in before or None in dataclasses.astuple(asked):
        return asked
    given = [name for name in _TRIAD if locate(("trainer", name))[0].startswith("command line")]
    if not given:
        return asked if before["world_size"] == ranks.data * ranks.parts else asked.move_to(ranks.data)
    kept = [*given, {"train_batch": "micro_batch"}.get(given[0], "train_batch")] if len(given) == 1 else given
    return replace(asked, **{name: None for name in _TRIAD if name not in kept})


def _tell_origin(asked: int | None, given: Any, place: Place) -> str:
    """The source of a batch size in parentheses; empty if it was not requested but follows from the others."""
    if asked is None:
        return ""
    # A requested size that differs from the document's was derived from a document resolved for other ranks.
    return f" ({describe_place(place)})" if asked == given else " (derived)"


def tell_sizes(given: dict[str, Any], batch: BatchSizes, world_size: int) -> dict[Path, str]:
    """A text by path on how each batch size that the section `given` leaves open was derived."""
    derived: dict[Path, str] = {}
    formulas = {
        "train_batch": f"micro_batch {batch.micro_batch} x grad_accum {batch.grad_accum} x {world_size} ranks",
        "micro_batch": f"train_batch {batch.train_batch} / grad_accum {batch.grad_accum} / {world_size} ranks",
        "grad_accum": f"train_batch {batch.train_batch} / micro_batch {batch.micro_batch} / {world_size} ranks",
    }
    both = all(given.get(key, "auto") != "auto" for key in ("train_batch", "micro_batch"))
    for key, formula in formulas.items():
        if given.get(key, "auto") == "auto" or given[key] != getattr(batch, key):
            derived["trainer", key] = f"derived: {formula}" if both or key != "grad_accum" else "default"
    return derived
