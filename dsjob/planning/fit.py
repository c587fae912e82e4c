"""Decides whether a job fits into memory, suggests changes that make it fit, and tabulates the alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsjob.planning.memory import Memory, predict_memory
from dsjob.planning.model import Layout, Model, Offload, OptimizerState

_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that determines the memory of a rank.

    `activations`, `largest_activation` and `moved_activations` (activations kept on the host) are bytes for one micro
    batch of the layout. `activations` is None if unknown, the others are 0.
    """

    model: Model
    layout: Layout
    state: OptimizerState
    activations: int | None = None
    largest_activation: int = 0
    moved_activations: int = 0

    def memory(self) -> Memory:
        """The memory of rank 0."""
        return predict_memory(
            self.model,
            self.layout,
            self.state,
            activations=self.activations,
            largest_activation=self.largest_activation,
            moved_activations=self.moved_activations,
        )

    def change(self, **changes: int | str) -> Job:
        """The same job in another layout.

        The samples per step stay the same, so `grad_accum` is adjusted. Activations scale with the micro batch.
        """
        old = self.layout
        new = replace(old, **changes)  # type: ignore[arg-type]
        samples = old.micro_batch * old.grad_accum * old.world_size
        new = replace(new, grad_accum=max(1, math.ceil(samples / (new.micro_batch * new.world_size))))
        scaled = None if self.activations is None else self.activations * new.micro_batch // old.micro_batch
        largest = self.largest_activation * new.micro_batch // old.micro_batch
        moved = self.moved_activations * new.micro_batch // old.micro_batch
        return replace(self, layout=new, activations=scaled, largest_activation=largest, moved_activations=moved)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the sweep. `peaks`: peak bytes on the device by micro batch; `host`: bytes of host memory per rank."""

    stage: int
    offload: Offload
    peaks: dict[int, int]
    host: int


def sweep(job: Job) -> list[Row]:
    """The memory for every ZeRO stage and offload setting, with micro batches around the job's own."""
    own = job.layout.micro_batch
    batches = sorted({1, max(own // 2, 1), own, 2 * own, 4 * own}) if job.activations is not None else [own]
    rows = []
    for stage in range(job.layout.most_stage + 1):
        # With offloaded parameters, activations are most of what a device holds.
        offloads: tuple[Offload, ...] = ("none", "optimizer", *(("param",) if _may_offload_parameters(job) else ()))
        for offload in offloads:
            jobs = {batch: job.change(stage=stage, offload=offload, micro_batch=batch) for batch in batches}
            if not jobs[own].layout.offload_problem:
                peaks = {batch: changed.memory().peak for batch, changed in jobs.items()}
                rows.append(Row(stage, offload, peaks, jobs[own].memory().host))
    return rows


def _may_offload_parameters(job: Job) -> bool:
    """Whether most of the device's part is known, and stages of a pipeline do not rule it out."""
    return job.activations is not None and job.layout.stages == 1


def find_remedies(job: Job, limit: int, checkpointed: int | None = None) -> list[str]:
    """The smallest change of each kind that makes the job fit into `limit` bytes per device, as overrides.

    `checkpointed`: bytes of activations with activation checkpointing; None if the job already uses it. The list is
    empty if no single change is enough, not even sharding over 4,096 ranks.
    """
    return [text for text, changed in _list_remedies(job, checkpointed, limit) if changed.memory().peak <= limit]


def _list_remedies(job: Job, checkpointed: int | None, limit: int) -> Iterator[tuple[str, Job]]:
    layout = job.layout
    batch = layout.micro_batch // 2
    while job.activations is not None and batch >= 1:
        smaller = job.change(micro_batch=batch)
        if smaller.memory().peak <= limit or batch == 1:
            yield f"trainer.micro_batch={batch}", smaller
            break
        batch //= 2
    for stage in range(layout.stage + 1, layout.most_stage + 1):
        higher = job.change(stage=stage)
        if layout.world_size > 1 and higher.memory().peak <= limit:
            yield f"zero_optimization.stage={stage}", higher
            break
    for offload, least in (("optimizer", max(layout.stage, 1)), ("param", 3)):
        off = job.change(offload=offload, stage=least)
        if (
            layout.offload == "none"
            and off.memory().peak <= limit
            and (offload != "param" or _may_offload_parameters(job))
        ):
            at = "" if least == layout.stage else f" at zero_optimization.stage={least}"
            yield f"zero_optimization.offload_{offload}.device=cpu{at}", off
            break
    ranks = 2 * layout.world_size
    while ranks <= _MOST_RANKS:
        stage = layout.stage or layout.most_stage
        more = job.change(world_size=ranks, stage=stage)
        if more.memory().peak > limit:
            more = job.change(world_size=ranks, stage=layout.most_stage)
        if more.memory().peak <= limit:
            yield f"{ranks * layout.model_ranks} ranks at zero_optimization.stage={more.layout.stage}", more
            break
        ranks *= 2
    if checkpointed is not None:
        yield "activation_checkpointing.mode=full", replace(job, activations=checkpointed)
