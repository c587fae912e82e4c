"""Chooses what trains a model of a job: dsjob's own engine, or the installed DeepSpeed behind the same interface.

Code that depends on the difference reads properties of the engine, such as `Engine.divides_gradients`. Before there is
an engine, checks of the document call `is_driven`, and plans read `JobSpec.driven`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dsjob.contract.resolved import ResolvedModel
from dsjob.engine.build import CreateOptimizer, MakeScheduler, build_engine
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.parallel.pipeline.passes import StagePasses
from dsjob.ranks.mesh import World
from dsjob.trust.grant import Trust

_OWN = "set engine: dsjob, or remove create_optimizer and create_scheduler from the class of trainer.parts"


def build_job_engine(
    model: nn.Module,
    job: ResolvedModel,
    world: World,
    *,
    trust: Trust,
    create: CreateOptimizer | None = None,
    schedule: MakeScheduler | None = None,
    pipeline: StagePasses | None = None,
) -> Engine:
    """Builds the engine for one model of a job. create, schedule: build its optimizer and its schedule, instead of the
    document. pipeline: see `build_engine`.

    Raises UsageError if the job asks for DeepSpeed, and it is not installed or refuses the job.
    """
    spec, config = job.spec, job.config
    if spec.driven:
        from dsjob.engine import driven  # its imports are slow, and few jobs need them

        if create is not None or schedule is not None:
            raise UsageError("engine: deepspeed builds the optimizer and the schedule of the document", hint=_OWN)
        return driven.build_engine(model, spec, world, trust=trust, config=config, document=job.sections)
    given: dict[str, Any] = {
        "trust": trust,
        "config": config,
        "create": create,
        "lr_scheduler": schedule,
        "pipeline": pipeline,
    }
    return build_engine(model, spec, world, kind=Engine, **given)
