"""Chooses what trains a model of a job: dsjob's own engine, or the installed DeepSpeed behind the same interface.

Code that depends on the difference reads properties of the engine, such as `Engine.divides_gradients`. Before there is
an engine, checks of the document call `is_driven`, and plans read `JobSpec.driven`.
"""

from __future__ import annotations

from torch import nn

from dsjob.contract.resolved import ResolvedModel
from dsjob.engine.build import build_engine
from dsjob.engine.engine import Engine
from dsjob.ranks.mesh import World
from dsjob.trust.grant import Trust


def build_job_engine(model: nn.Module, job: ResolvedModel, world: World, *, trust: Trust) -> Engine:
    """Builds the engine for one model of a job.

    Raises UsageError if the job asks for DeepSpeed, and it is not installed or refuses the job.
    """
    spec, config = job.spec, job.config
    if spec.driven:
        from dsjob.engine import driven  # its imports are slow, and few jobs need them

        return driven.build_engine(model, spec, world, trust=trust, config=config, document=job.sections)
    return build_engine(model, spec, world, kind=Engine, trust=trust, config=config)
