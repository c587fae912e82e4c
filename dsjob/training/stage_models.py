"""The model of a rank in a pipeline, built without memory for the parameters of other stages.

It is built before the training data, whose construction may draw random numbers after it, as without a pipeline. But a
model that is not a sequence of layers is traced with a batch. So at first, a rank keeps what its stage probably needs,
and builds the model again in the rare case that it lacks something.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dsjob.checkpoint.live.rng import keep_rng
from dsjob.contract.paths import Path
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import JobSpec, Target
from dsjob.contract.stages import Pipeline as Section
from dsjob.errors import DsjobError
from dsjob.parallel.own_parts import NotInPartsError, Sketch, build_together, list_without_values
from dsjob.parallel.pipeline.calls import guess_owned
from dsjob.parallel.pipeline.layers import count_parameters, list_layers
from dsjob.pipelines.partition import partition
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import Ranks, World
from dsjob.ranks.seeding import seed_rng
from dsjob.training.build import build_model, build_models
from dsjob.training.pipelines import Complete, is_sequence
from dsjob.training.probe import build_on_meta
from dsjob.training.sharded_models import Say, choose_maker
from dsjob.trust.grant import Trust

_CPU = torch.device("cpu")
_WHOLE = "each rank builds the whole model in host memory before it keeps its stage: "


def build_stage_models(
    job: ResolvedJob, world: World, trust: Trust, say: Say
) -> tuple[dict[str, nn.Module], Complete | None]:
    """The models of a job, as `build_models` builds them. In a pipeline, only the parameters that the stage probably
    needs have values; then the second result gives others values too (see `cut_stage`).

    say: tells the user if the whole model is built instead, and why. Raises as `build_models`.
    """
    if job.spec.pipeline.size == 1:
        return build_models(job, trust, choose_maker(job, world, say)), None
    maker = _Maker(job.spec, world, trust, say)
    return build_models(job, trust, maker.make), maker.complete


class _Maker:
    """Builds the model of a pipeline, perhaps more than once."""

    def __init__(self, spec: JobSpec, world: World, trust: Trust, say: Say) -> None:
        self._spec, self._world, self._trust, self._say = spec, world, trust, say
        self._sketch: Sketch | None = None
        self._model: nn.Module
        self._build: Callable[[], nn.Module]

    def make(self, target: Target, trust: Trust, where: Path) -> nn.Module:
        """The model, with values for the parameters that this stage probably needs."""
        self._build = lambda: build_model(target, trust, where)
        try:
            if self._spec.pipeline.partition.lower() == "time":
                raise NotInPartsError("partition time measures all layers")
            with keep_rng(_CPU):
                self._sketch = Sketch(lambda: build_on_meta(target, trust, downloads=True))
                kept = _guess(self._sketch.model, self._spec.pipeline, self._world.pipe)
        except (DsjobError, NotInPartsError) as error:
            self._sketch = None
            self._model = self._build()  # fails in the same way, if the model or its division is to blame
            self._say("note", _WHOLE + str(error).partition("\n")[0])
        else:
            self._model = self._build_kept(kept)
        return self._model

    def complete(self, needed: set[str]) -> nn.Module:
        """The model with values for all of `needed`: another object, if it was built without some of them."""
        missing = list_without_values(self._model) & needed
        # Together with the other ranks: the constructor may call collectives.
        if any(all_gather(self._world.everyone, bool(missing))) and self._sketch is not None:
            trained = {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}
            with keep_rng(_CPU):
                self._model = self._build_kept(needed)
            for name, parameter in self._model.named_parameters():
                parameter.requires_grad_(trained[name])
        return self._model

    def _build_kept(self, kept: set[str]) -> nn.Module:
        seed_rng(self._spec.trainer.seed)
        model, problem = build_together(self._sketch, self._build, kept, self._world)
        if model is None:
            self._say("note", f"{_WHOLE}{problem}")
            seed_rng(self._spec.trainer.seed)
            model = self._build()
        return model


def _guess(model: nn.Module, section: Section, ranks: Ranks) -> set[str]:
    """The names of the parameters that this rank probably needs."""
    count = ranks.size * section.chunks
    own = range(ranks.rank, count, ranks.size)
    if not is_sequence(model):
        return guess_owned(model, count, section.partition, own)
    layers = list_layers(model)  # type: ignore[arg-type]
    sizes = count_parameters(layers)
    bounds = partition(section.partition, count, names=[layer.kind for layer in layers], parameters=sizes)
    there = [each.made[0] for part in own for each in layers[bounds[part] : bounds[part + 1]]]
    mine = {id(p) for module in there if isinstance(module, nn.Module) for p in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in mine}
