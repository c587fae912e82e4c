"""A job whose model is divided among pipeline stages: how it is divided, and its training step.

All ranks of a pipeline read the same batches. So a stage computes masks and positions itself, and only receives what
earlier layers have computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsjob import checkpointing
from dsjob.checkpoint.live.rng import keep_rng
from dsjob.compute.find_blocks import find_blocks, mark_block
from dsjob.compute.precision import Precision
from dsjob.contract.spec import JobSpec, make_target
from dsjob.contract.stages import Pipeline as Section
from dsjob.data import Loader, TrainingLoader
from dsjob.data.batches import count_samples
from dsjob.engine.blocks import prepare_blocks
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.errors import ContractError, DsjobError, UsageError
from dsjob.parallel.pipeline.as_whole import require_whole_passes
from dsjob.parallel.pipeline.calls import Cut, cut_model, trace
from dsjob.parallel.pipeline.layers import Layers, count_parameters, list_layers
from dsjob.parallel.pipeline.measure import measure_layers
from dsjob.parallel.pipeline.module import PipelineModule
from dsjob.parallel.pipeline.passes import MakeSchedule, StagePasses
from dsjob.parallel.pipeline.stage import Stage, cut_sequence
from dsjob.parallel.pipeline.walk import Walk, take_part
from dsjob.parallel.strategy import MicroBatch
from dsjob.pipelines.orders import SCHEDULES
from dsjob.pipelines.partition import partition
from dsjob.pipelines.schedules import PipeSchedule
from dsjob.ranks.agreement import on_rank_0
from dsjob.ranks.mesh import World
from dsjob.training.averaging import Part
from dsjob.training.evaluation import name_data, read_set
from dsjob.training.loaders import Collate, build_evaluation_sets, build_training_data
from dsjob.training.metrics import Measures
from dsjob.training.objective import Objective, build_objective
from dsjob.training.trainer import Parts
from dsjob.trust.frames import describe_failure
from dsjob.trust.grant import Trust
from dsjob.trust.targets import build_callable

_PLACE = ("model", "_target_")
_ALONE = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))
ReadBatch = Callable[[], Any]
Complete = Callable[[set[str]], nn.Module]


class _Given(NamedTuple):
    """What a model is called with."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def capture(objective: Objective, batch: Any) -> _Given:
    """What the job calls its model with for a batch."""
    found: list[_Given] = []
    objective.call(lambda *args, **kwargs: found.append(_Given(args, kwargs)), batch)
    return found[0]


def build_passes(
    models: dict[str, nn.Module],
    spec: JobSpec,
    world: World,
    trust: Trust,
    read_batch: ReadBatch,
    complete: Complete | None = None,
) -> StagePasses | None:
    """Divides the model of a job, which it replaces in `models`; None without a pipeline. A collective.

    read_batch: returns a micro batch on the CPU; it is called on rank 0, if the model is not a sequence of layers.
    complete: see `cut_stage`. Raises UsageError, ContractError, TargetError.
    """
    if spec.pipeline.size == 1:
        return None
    ((name, model),) = models.items()
    try:
        stage = cut_stage(model, spec, world, trust, read_batch, complete)
        if spec.generation is not None:
            require_whole_passes(stage.module)  # before anything is trained
        models[name] = stage.module
    except DsjobError as error:
        error.put_at(("pipeline", "partition") if isinstance(error, UsageError) else _PLACE)
        raise
    return StagePasses(stage, world, make_schedule(spec.pipeline, trust))


def make_schedule(section: Section, trust: Trust) -> MakeSchedule:
    """The schedule of a document. Raises TargetError, ContractError."""
    if isinstance(section.schedule, str):
        return functools.partial(SCHEDULES[section.schedule], chunks=section.chunks)
    given: Any = section.schedule
    where = ("pipeline", "schedule")
    made = build_callable(make_target({"_partial_": True, **given}), "pipeline.schedule", trust, where)

    def make(micro_batches: int, stages: int, stage: int) -> PipeSchedule:
        found = made(micro_batches, stages, stage)
        if not isinstance(found, PipeSchedule):
            error = ContractError(
                f"pipeline.schedule: {given['_target_']} returned {type(found).__name__}, not a PipeSchedule",
                hint="derive a class from dsjob.pipelines.schedules.PipeSchedule",
            )
            error.put_at((*where, "_target_"))
            raise error
        return found

    return make


def is_sequence(model: nn.Module) -> bool:
    """Whether a model calls layers one after another, so that it need not be traced."""
    return type(model).forward in (nn.Sequential.forward, Layers.forward)


def cut_stage(
    model: nn.Module, spec: JobSpec, world: World, trust: Trust, read_batch: ReadBatch, complete: Complete | None = None
) -> Stage:
    """Leaves of a model, in place, only the layers of this rank's stage. See `build_passes`.

    complete: returns the model with values for the parameters that it is called with; another object, if the model was
    built without some of them."""
    if isinstance(model, PipelineModule):
        raise ContractError(
            "the model is a PipelineModule, which divides the ranks itself",
            hint="return a torch.nn.Sequential or dsjob.Layers",
        )
    section, ranks = spec.pipeline, world.pipe
    _mark_blocks(model)
    given = _read_inputs(model, spec, trust, read_batch)
    if is_sequence(model):
        assert isinstance(model, (nn.Sequential, Layers))
        layers = list_layers(model)
        seconds = None
        if section.partition.lower() == "time":
            seconds = on_rank_0(world.everyone, lambda: measure_layers(layers, given().args, world.device))
        bounds = partition(
            section.partition,
            ranks.size * section.chunks,
            names=[layer.kind for layer in layers],
            parameters=count_parameters(layers),
            seconds=seconds,
        )
        prepare_blocks(model, spec)
        return cut_sequence(
            model,
            layers,
            bounds,
            rank=ranks.rank,
            ranks=ranks.size,
            interval=section.activation_checkpoint_interval,
            again=checkpointing.checkpoint,
            seed=spec.trainer.seed if section.seed_layers else None,
        )
    for key in ("activation_checkpoint_interval", "seed_layers"):
        if getattr(section, key):
            raise UsageError(
                f"pipeline.{key} is for models of layers, and the model is {type(model).__name__}",
                hint="use activation_checkpointing" if key.startswith("act") else "leave it out",
            )
    cut = on_rank_0(world.everyone, lambda: _cut(model, given(), ranks.size * section.chunks, section.partition))
    if complete is not None:
        model = complete(
            {name for name, parts in cut.owners.items() if any(p % ranks.size == ranks.rank for p in parts)}
        )
        _mark_blocks(model)
    prepare_blocks(model, spec)
    stage = take_part(model, cut, rank=ranks.rank, ranks=ranks.size)
    compute = Precision.of(spec, world.device).compute
    if isinstance(stage.module.forward, Walk) and compute != torch.float32:
        stage.module.forward.use_dtype(compute)
    return stage


def _mark_blocks(model: nn.Module) -> None:
    for block in find_blocks(model):
        mark_block(block)  # where a stage has a single block, it would no longer look like one


def _read_inputs(model: nn.Module, spec: JobSpec, trust: Trust, read_batch: ReadBatch) -> Callable[[], _Given]:
    def read() -> _Given:
        with torch.random.fork_rng([]):
            objective = build_objective(spec, model, torch.device("cpu"), trust)
            return capture(objective, read_batch())

    return read


def _cut(model: nn.Module, given: _Given, count: int, method: str) -> Cut:
    try:
        traced = trace(model, given.args, given.kwargs)
    except DsjobError:
        raise
    except Exception as error:  # the model's own
        raise ContractError(
            f"the model could not be divided into pipeline stages: {describe_failure(error)}",
            hint="its forward pass was traced with a micro batch on the CPU; list the model's layers in dsjob.Layers",
        ) from error
    return cut_model(model, traced, count, method)


def read_first(spec: JobSpec, loader: Loader, collate: Collate, trust: Trust, parts: Parts) -> Any:
    """A micro batch of the training data, which is not taken away from the training. Raises DataError."""
    with keep_rng(_ALONE.device):
        if isinstance(loader, TrainingLoader):
            return loader.peek()
        # A second time, since what is read from a stream is gone.
        return next(iter(build_training_data(spec, _ALONE, collate, trust, parts.trainer.get_train_dataloader)))


def read_first_evaluated(spec: JobSpec, collate: Collate, trust: Trust, parts: Parts) -> Any:
    """A batch of the first set that is evaluated. Raises DataError."""
    with keep_rng(_ALONE.device):
        sets = build_evaluation_sets(spec, _ALONE, collate, trust, "eval", "test", read=parts.read_set)
        prefix, data = next(iter(sets.items()))
        return next(read_set(spec, _ALONE, data, name_data(prefix), collate=collate, max_batches=1))[0]


class PipelinedStep:
    """The training step of a pipeline: all micro batches of a step together.

    Raises ContractError for a Trainer that replaces a step.
    """

    def __init__(self, objective: Objective, measures: Measures, parts: Parts) -> None:
        self._objective, self._measures = objective, measures
        for method in ("compute_loss", "training_step", "prediction_step"):
            if parts.overrides(method):
                error = ContractError(
                    f"{parts.name} has {method}, which runs one micro batch, but a pipeline runs all of them together",
                    hint="set loss, targets and outputs in the document, or leave pipeline.stages out",
                )
                error.put_at(("trainer", "parts", "_target_"))
                raise error

    def run(self, engines: Engines, pairs: Sequence[tuple[Any, Part]]) -> dict[str, Tensor]:
        """Trains on the micro batches of a step, each with its part in it. Returns detached means over them by name,
        `loss` first; those of single losses are only on the last stage."""
        engine, objective, last = engines.first, self._objective, pairs[-1][1]
        found: dict[str, list[Tensor]] = {}

        def compute(outputs: Any, target: tuple[Any, Part]) -> Tensor:
            batch, part = target
            losses = objective.find(outputs, batch)
            weighed = part.weigh(losses)
            loss: Tensor = objective.add(weighed)
            if self._measures:
                mean = objective.add([each.mean for each in losses])
                self._measures.feed(outputs, batch, mean, count_samples(batch), objective)
            for name, each in objective.name(weighed).items():
                found.setdefault(name, []).append(each.detach())
            return loss

        micro_batches = [MicroBatch(*capture(objective, pair[0]), target=pair) for pair in pairs]
        loss = engine.run_step(micro_batches, compute, lambda: self._settle(engine, last))
        named = {name: torch.stack(values).mean() for name, values in found.items()} if engine.world.reports else {}
        rest = [name for name in objective.name([None] * max(1, len(objective.losses))) if name != "loss"]
        return {"loss": loss, **{name: named.get(name, torch.zeros_like(loss)) for name in rest}}

    def _settle(self, engine: Engine, part: Part) -> None:
        """Corrects the gradients of all stages if the loss function, which only the last one calls, has returned
        counts."""
        if len(self._objective.losses) != 1:
            return  # then no loss returns counts
        passes = engine.strategy.pipeline
        assert isinstance(passes, StagePasses)
        by = part.step.find_correction()
        none = torch.zeros((), device=engine.device)
        shared = passes.share([none if by is None else by] if passes.is_last else [], 1)[0]
        # Waits for the device, as the step of a loss with counts does nowhere else.
        if float(shared):
            engine.divide_gradients(shared)
