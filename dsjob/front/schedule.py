"""The timeline of a job's pipeline, predicted from its document."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dsjob.contract.spec import JobSpec, view
from dsjob.document.origins import Composed
from dsjob.document.resolve import resolve_job
from dsjob.document.sizes import choose_world_size
from dsjob.errors import UsageError
from dsjob.front.unnamed import complete
from dsjob.launch import launcher
from dsjob.launch.rank import add_import_folders
from dsjob.pipelines.orders import SCHEDULES
from dsjob.pipelines.timeline import Timeline, require_sound, simulate
from dsjob.trust.grant import Trust


def plan_schedule(composed: Composed, trust: Trust, world_size: int | None = None) -> Timeline:
    """The timeline of one optimizer step of one pipeline, if a backward pass takes twice as long as a forward pass, and
    messages take no time. world_size: by default that of the document, or as many ranks as the pipeline has stages.

    Raises DocumentError; UsageError for a document without a pipeline, and for a schedule that cannot be carried out.
    """
    given = complete(composed.document, micro_batch=1)
    stages = given.get("pipeline", {}).get("stages") if isinstance(given.get("pipeline"), dict) else None
    ranks, told_by = choose_world_size(given, composed.locate, asked=world_size, started=launcher.read_world_size())
    if isinstance(stages, int) and world_size is None and ranks % stages:
        ranks, told_by = stages, "pipeline.stages"
    resolved = resolve_job(given, world_size=ranks, locate=composed.locate, ranks_from=told_by)
    return simulate_schedule(view(JobSpec, resolved.document), trust)


def simulate_schedule(spec: JobSpec, trust: Trust) -> Timeline:
    """The timeline of a resolved job. Raises UsageError."""
    section, micro_batches = spec.pipeline, spec.trainer.grad_accum
    if section.size == 1:
        raise UsageError("the document has no pipeline", hint="pipeline.stages=4")
    make: Callable[[int, int, int], Any]
    name: str
    if isinstance(section.schedule, str):
        make, name = functools.partial(SCHEDULES[section.schedule], chunks=section.chunks), str(section.schedule)
    else:
        from dsjob.training.pipelines import make_schedule

        add_import_folders(trust.importable)
        make, name = make_schedule(section, trust), "pipeline.schedule"
    made = [make(micro_batches, section.size, stage) for stage in range(section.size)]
    streams = [[instruction for step in each for instruction in step] for each in made]
    require_sound(streams, section.chunks, micro_batches, name)
    return simulate(streams, section.chunks)
