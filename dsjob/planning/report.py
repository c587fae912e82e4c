"""A complete plan as data, and its JSON form, which `--format json` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsjob.planning.communication import CheckpointSize, Transfer
from dsjob.planning.fit import Job, Row
from dsjob.planning.memory import MOMENTS, Memory
from dsjob.planning.model import Model, count, keep_masters

BUILT = {"whole": "the whole model", "stage": "its stage", "share": "its share of the model"}


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations for one micro batch; None if unknown.

    `whole`: without activation checkpointing. `checkpointed`: kept with it, plus `recomputed` while a block is
    recomputed. `largest`: the largest single activation, whose gradient is as large. `moved`: kept on the host with
    checkpointing. `on`: whether the document enables checkpointing. `reason`: why nothing was measured.
    """

    whole: int | None = None
    checkpointed: int | None = None
    recomputed: int | None = None
    largest: int = 0
    reason: str = ""
    moved: int = 0
    on: bool = False

    @property
    def with_checkpointing(self) -> int | None:
        """Peak bytes with activation checkpointing."""
        return None if self.checkpointed is None else self.checkpointed + (self.recomputed or 0)

    @property
    def asked(self) -> int | None:
        """Peak bytes with the document's own setting."""
        return self.with_checkpointing if self.on and self.checkpointed is not None else self.whole


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank of one stage holds and sends: the first along `tensor` and `context`, which holds the most.

    held: how many micro batches it keeps activations of. transfers: along all axes but that of the data.
    """

    model: Model
    activations: Activations
    held: int = 1
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class Course:
    """The length of a run: samples in the dataset, steps per epoch, steps in total (None if unknown).

    `rates`: (step, learning rate) pairs. `lengths`: (key, text) pairs for lengths with a unit: the steps they stand
    for.
    """

    samples: int | None = None
    steps_per_epoch: int | None = None
    steps: int | None = None
    rates: tuple[tuple[int, float], ...] = ()
    lengths: tuple[tuple[str, str], ...] = ()


def find_largest(jobs: Sequence[Job]) -> int:
    """The stage whose ranks need most memory. jobs: one for each stage."""
    return max(range(len(jobs)), key=lambda stage: jobs[stage].memory().peak)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job needs. `limit`, `host_limit`: bytes of memory of a device and of a machine; None if unknown.

    `model`: the whole one. `jobs`: what a rank of each pipeline stage needs, one without a pipeline.
    `measured_here`: whether `host_limit` is that of this machine. `ranks_here`: ranks on one machine, as far as the
    document says. `builds`: what a rank builds of the model (`training.stage_models`, `training.sharded_models`).
    """

    name: str
    source: str
    precision: str
    model: Model
    jobs: tuple[Job, ...]
    activations: Activations
    communication: tuple[Transfer, ...]
    checkpoint: CheckpointSize
    keep: int
    course: Course
    limit: int | None = None
    notes: tuple[str, ...] = ()
    host_limit: int | None = None
    measured_here: bool = False
    ranks_here: int = 1
    builds: Literal["whole", "stage", "share"] = "whole"

    def __repr__(self) -> str:
        ranks = self.job.layout.world_size * self.job.layout.model_ranks
        fits = "" if self.limit is None else f", {'fits' if self.fits else 'does not fit'} in {show_bytes(self.limit)}"
        return f"Plan({self.name}, {ranks} rank{'s' * (ranks > 1)}, {show_bytes(self.memory.peak)} per rank{fits})"

    @property
    def stage(self) -> int:
        """The stage whose ranks need most memory."""
        return find_largest(self.jobs)

    @property
    def job(self) -> Job:
        """What a rank of that stage needs."""
        return self.jobs[self.stage]

    @property
    def memory(self) -> Memory:
        """The memory of the largest rank."""
        return self.job.memory()

    @property
    def fits(self) -> bool | None:
        """Whether the job fits; None if no device memory was given."""
        return None if self.limit is None else self.memory.peak <= self.limit

    @property
    def building(self) -> int:
        """Bytes of host memory that a rank needs at its start, at most, when it builds the model there, and if it
        shards it, casts it to the dtype of the masters; in a pipeline its stage, and one more parameter at a time.
        Tensor parallelism divides it only afterwards. A rank that builds a share holds in the end that and as many
        bytes of shards."""
        whole = needed = max(_measure(self.model), _measure_cast(self.model, self.job))
        largest = max((weight.elements * weight.itemsize for weight in self.model.weights), default=0)
        if self.builds == "stage":
            sizes = (max(_measure(job.model), _measure_cast(job.model, job)) for job in self.jobs)
            needed = max(sizes) * self.job.layout.tensor + largest
        elif self.builds == "share":
            needed = 2 * math.ceil(_measure(self.model) / self.job.layout.world_size) + largest
        return min(whole, needed) + self.model.buffers

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems outside the devices: too little host memory."""
        kept = self.memory.host
        needed = self.ranks_here * max(self.building, kept)
        if self.host_limit is None or needed <= self.host_limit:
            return ()
        ranks = f"{self.ranks_here} ranks on a machine need" if self.ranks_here > 1 else "a rank needs"
        machine = "this machine" if self.measured_here else "the machine"
        built = BUILT[self.builds]
        why = f"each builds {built} at its start" if self.building >= kept else "for what is offloaded"
        return (
            f"{ranks} {show_bytes(needed)} of host memory ({why}), but {machine} has {show_bytes(self.host_limit)}",
        )


def _measure(model: Model) -> int:
    return sum(weight.elements * weight.itemsize for weight in model.weights)


def _measure_cast(model: Model, job: Job) -> int:
    """Bytes of a model that is cast on the host; nothing if that happens on the device."""
    return 0 if job.layout.replicated else _measure(keep_masters(model, job.layout, job.state)[0])


def to_json(plan: Plan, rows: list[Row]) -> dict[str, Any]:
    """The plan as JSON values. Bytes are integers."""
    memory, layout, model = plan.memory, plan.job.layout, plan.model
    return {
        "name": plan.name,
        "model": {
            "source": plan.source,
            "parameters": count(model.weights),
            "trainable": count(model.trainable),
            "blocks": model.blocks,
            "assumed": model.assumed or None,
        },
        "layout": {**asdict(layout), "precision": plan.precision},
        "memory": {
            "items": [asdict(item) for item in memory.items],
            "total": {moment: memory.total(moment) for moment in MOMENTS},
            "model_states": memory.states,
            "peak": memory.peak,
            "peak_moment": memory.peak_moment,
            "host": memory.host,
            "disk": memory.disk,
            "host_at_start": plan.building,
        },
        "stages": [_describe_stage(job) for job in plan.jobs],
        "activations": {**asdict(plan.activations), "with_checkpointing": plan.activations.with_checkpointing},
        "communication": [asdict(transfer) for transfer in plan.communication],
        "checkpoint": {**asdict(plan.checkpoint), "keep": plan.keep},
        "course": asdict(plan.course),
        "device_memory": plan.limit,
        "host_memory": plan.host_limit,
        "fits": plan.fits,
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
        "sweep": [asdict(row) for row in rows],
    }


def _describe_stage(job: Job) -> dict[str, int]:
    memory = job.memory()
    parameters = count(job.model.weights)
    return {"parameters": parameters, "held": job.layout.held, "model_states": memory.states, "peak": memory.peak}


def show_bytes(size: float) -> str:
    """Formats bytes: 1610612736 as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}" if abs(size) < 1000 else f"{size:,.0f} {unit}"
