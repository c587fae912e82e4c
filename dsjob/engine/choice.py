"""The one place that decides who trains a model of a job: dsjob's own engine, or the installed DeepSpeed behind it.

What differs between the two is asked of the engine, such as `Engine.divides_gradients`. Before there is one, checks of
the document ask `is_driven`, and plans `JobSpec.driven`.
"""

from __future__ import annotations

from torch import nn

from dsjob.contract.resolved import ResolvedModel
from dsjob.engine.build import build_engine
from dsjob.engine.engine import Engine
from dsjob.ranks.mesh import World
from dsjob.trust.grant import Trust


def build_job_engine(model: nn.Module, job: ResolvedModel, world: World, *, trust: Trust) -> Engine:
    """The engine of one model of a job.

    Raises UsageError where DeepSpeed is asked for and not installed, or refuses the job.
    """
    spec, config = job.spec, job.config
    if spec.driven:
        from dsjob.engine import driven  # only jobs that ask for it pay for its imports

        return driven.build_engine(model, spec, world, trust=trust, config=config, document=job.sections)
    return build_engine(model, spec, world, kind=Engine, trust=trust, config=config)
