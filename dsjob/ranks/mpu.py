"""Model-parallel units (mpu): a program's description of which ranks share a model and which are data-parallel.

DeepSpeed's form is an object with get_{model,data}_parallel_{rank,world_size,group}(). Megatron names the model half
get_tensor_model_parallel_*. Determined's form is an object with four fields and no groups; this module creates the
groups. The program itself implements the communication between the parts of its model.

Code that shards, reduces or counts samples only needs `World`'s data_rank, data_size and data_group. The parts of a
model are never resharded: a checkpoint names them `mp_rank_00`, ... and loads only with the same number of parts. An
error in one rank's unit is raised on all ranks. hpZ, MiCS and the 1-bit optimizers are rejected, because they form
groups of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from dsjob.errors import DataError, DsjobError, UsageError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import Ranks, World
from dsjob.torch_private import make_group
from dsjob.trust.frames import describe_failure

T = TypeVar("T")
_METHODS = "get_data_parallel_{rank,world_size,group}() and get_model_parallel_{rank,world_size,group}()"
_FIELDS = "data_parallel_rank, data_parallel_world_size, should_report_metrics, should_build_dataloader"
_MODEL = ("get_model_parallel_", "get_tensor_model_parallel_")
_MARKS = ("model_parallel", "tensor_model_parallel")  # DeepSpeed's and Megatron's attributes of parameters
_TIED = "_dsjob_tied"


class ModelParallelUnit:
    """Determined's form: the role of this rank. Determined spells the last field in two ways."""

    def __init__(
        self,
        data_parallel_rank: int,
        data_parallel_world_size: int,
        should_report_metrics: bool = True,
        should_build_dataloader: bool | None = None,
        *,
        should_build_data_loader: bool | None = None,
    ) -> None:
        said = {should_build_dataloader, should_build_data_loader} - {None}
        if len(said) > 1:
            raise UsageError("should_build_dataloader and should_build_data_loader have different values")
        self.data_parallel_rank, self.data_parallel_world_size = data_parallel_rank, data_parallel_world_size
        self.should_report_metrics = should_report_metrics
        self.should_build_dataloader = self.should_build_data_loader = said != {False}


class _Said(NamedTuple):
    """The content of one rank's unit, exchanged among all ranks."""

    rank: int  # data-parallel
    size: int
    reports: bool
    loads: bool
    has_groups: bool


def divide(world: World, mpu: Any) -> World:
    """Divides `world`, all ranks of the job, as `mpu` describes. A collective; each rank passes its own unit.

    Raises UsageError if the units are invalid or do not fit together; wherever possible, on all ranks.
    """
    if mpu is None:
        return world
    everyone = all_gather(world.everyone, _make_together(lambda: _read(mpu), world))
    said = everyone[world.everyone.rank]
    # Every rank sees all units, so this raises the same error on each.
    _require_duties(everyone)
    if said.has_groups:
        model, group = _make_together(lambda: (find_model_ranks(mpu), mpu.get_data_parallel_group()), world)
    else:
        model, group = _form_groups(everyone, world.timeout)
    place = _make_together(lambda: _find_place(said, model, group, world), world)
    # (data-parallel rank, model-parallel rank) of each rank of the job, in rank order.
    places = all_gather(world.everyone, place)
    world = dataclasses.replace(world, reports=said.reports, loads=said.loads)
    if model.size == 1:
        return world
    model = dataclasses.replace(model, timeout=world.timeout)
    return dataclasses.replace(
        world,
        data_rank=said.rank,
        data_size=said.size,
        data_group=group,
        model=model,
        tensor=model,
        opaque=True,
        order=_order_ranks(places, model.size),
    )


def read_data_ranks(mpu: Any) -> tuple[int, int]:
    """The data-parallel rank and world size, from an mpu of either form. Raises UsageError."""
    unit = _read_fields(mpu)
    return _call_for_ranks(mpu) if unit is None else (unit.data_parallel_rank, unit.data_parallel_world_size)


def _read(mpu: Any) -> _Said:
    unit = _read_fields(mpu)
    source: Any = unit or mpu
    builds = [bool(getattr(source, f"should_build_{name}", True)) for name in ("dataloader", "data_loader")]
    reports = bool(getattr(source, "should_report_metrics", True))
    return _Said(*read_data_ranks(mpu), reports, all(builds), unit is None)


def _find_place(said: _Said, model: Ranks, group: dist.ProcessGroup | None, world: World) -> tuple[int, int]:
    """The data-parallel and the model-parallel rank of this process. Raises UsageError if the sizes do not fit."""
    if said.size * model.size != world.everyone.size:
        raise UsageError(
            f"the mpu describes {said.size} data-parallel x {model.size} model-parallel ranks, but the job has"
            f" {world.everyone.size}",
            hint="the product must be the number of ranks: an mpu cannot add pipeline or sequence parallelism",
        )
    if model.size == 1:
        return said.rank, 0
    found = dist.get_rank(group), dist.get_world_size(group)
    if found != (said.rank, said.size):
        raise UsageError(
            f"the mpu returns data-parallel rank {said.rank} of {said.size}, but in its group this is rank"
            f" {found[0]} of {found[1]}"
        )
    return said.rank, model.rank


def _order_ranks(places: list[tuple[int, int]], size: int) -> tuple[int, ...]:
    """The job's ranks in mesh order: model-parallel rank m of data-parallel rank d is at index d * `size` + m.

    `places`: (d, m) of each rank. Raises UsageError if two ranks have the same place.
    """
    order: dict[int, int] = {}
    for rank, (data, model) in enumerate(places):
        other = order.setdefault(data * size + model, rank)
        if other != rank:
            raise UsageError(
                f"the mpus of ranks {other} and {rank} both return data-parallel rank {data} and model-parallel rank"
                f" {model}"
            )
    return tuple(order[place] for place in range(len(order)))


def _make_together(make: Callable[[], T], world: World) -> T:
    """Returns the result of `make` on this rank. If it raises on one rank, all ranks raise, so that none hangs."""
    own: Exception | None = None
    try:
        made = make()
    except Exception as error:
        own = error
    faults = all_gather(world.everyone, None if own is None else _describe(own))
    # This rank raises the original error, with its traceback; the others raise its text.
    if own is not None:
        raise own
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise UsageError(f"rank {rank}: {fault}")
    return made


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, DsjobError) else describe_failure(error)


def _read_fields(mpu: Any) -> ModelParallelUnit | None:
    """Determined's four fields; None for an object with methods."""
    if isinstance(mpu, Mapping):
        try:
            return ModelParallelUnit(**mpu)
        except TypeError as error:
            raise UsageError(f"the mpu is a dict with other keys: {error}", hint=f"it needs {_FIELDS}") from error
    if hasattr(mpu, "get_data_parallel_rank") or not hasattr(mpu, "data_parallel_rank"):
        return None
    loads = {
        key: getattr(mpu, key) for key in ("should_build_dataloader", "should_build_data_loader") if hasattr(mpu, key)
    }
    return ModelParallelUnit(
        mpu.data_parallel_rank, mpu.data_parallel_world_size, getattr(mpu, "should_report_metrics", True), **loads
    )


def _call_for_ranks(mpu: Any) -> tuple[int, int]:
    missing = [name for name in ("rank", "world_size", "group") if not hasattr(mpu, f"get_data_parallel_{name}")]
    if missing:
        raise UsageError(
            f"the mpu, of type {type(mpu).__name__}, has no get_data_parallel_{missing[0]}()",
            hint=f"it needs {_METHODS}; or the fields {_FIELDS}",
        )
    return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()


def _require_duties(everyone: list[_Said]) -> None:
    sizes = sorted({said.size for said in everyone})
    if len(sizes) > 1:
        raise UsageError(f"the ranks' mpus have different data-parallel world sizes: {', '.join(map(str, sizes))}")
    if not any(said.reports for said in everyone):
        raise UsageError("no rank's mpu reports metrics", hint="set should_report_metrics=True on at least one rank")
    idle = {said.rank for said in everyone} - {said.rank for said in everyone if said.loads}
    if idle:
        raise UsageError(
            f"no rank builds the loader of data-parallel rank {min(idle)}: no rank would read its samples",
            hint="set should_build_dataloader=True on one of its ranks",
        )


def _form_groups(everyone: list[_Said], timeout: float) -> tuple[Ranks, dist.ProcessGroup | None]:
    """Creates the groups for Determined's form. Ranks with the same data-parallel rank form a model-parallel group; the
    ranks at the same position in these groups form a data-parallel group.

    A collective. Raises UsageError if the model-parallel groups differ in size.
    """
    size = everyone[0].size
    # models[d]: the ranks that hold the model of data-parallel rank d together.
    models = [[number for number, said in enumerate(everyone) if said.rank == data] for data in range(size)]
    lengths = {len(members) for members in models}
    if len(lengths) > 1 or sum(map(len, models)) != len(everyone):
        told = ", ".join(str(said.rank) for said in everyone)
        raise UsageError(
            f"the ranks' mpus have data-parallel ranks {told} of {size}",
            hint=f"each data-parallel rank from 0 to {size - 1} must occur equally often",
        )
    if lengths == {1}:
        return Ranks(), None
    # models: [data][model] -> rank; its transpose has one data-parallel group per row.
    columns = [list(members) for members in zip(*models, strict=True)]
    allowed = timedelta(seconds=timeout)
    model, data = (make_group([sorted(ranks) for ranks in groups], allowed) for groups in (models, columns))
    return Ranks(dist.get_rank(model), dist.get_world_size(model), model), data


def find_model_ranks(mpu: Any) -> Ranks:
    """The model-parallel ranks that an mpu describes; only this rank if it describes none."""
    for start in _MODEL:
        if hasattr(mpu, start + "group"):
            group = getattr(mpu, start + "group")()
            return Ranks(dist.get_rank(group), dist.get_world_size(group), group) if group else Ranks()
    return Ranks()


def share(value: T, world: World) -> T:
    """`value` of the first model-parallel rank that builds a loader. A collective of the model-parallel ranks."""
    return _gather_read(value, world)[0]


def share_length(length: T, world: World, unit: str) -> T:
    """Like `share`, but raises DataError on all of these ranks if the loaders differ in length.

    `unit`: what is counted, for the message.
    """
    lengths = _gather_read(length, world)
    other = next((each for each in lengths if each != lengths[0]), lengths[0])
    if other != lengths[0]:
        raise DataError(
            f"ranks that hold one model have {lengths[0]} and {other} {unit}",
            hint="build the same dataset on each of them, or only on one (should_build_dataloader)",
        )
    return lengths[0]


def _gather_read(value: T, world: World) -> list[T]:
    """`value` of each model-parallel rank that builds a loader, in rank order."""
    if world.model.size == 1:
        return [value]
    return [given for loads, given in all_gather(world.model, (world.loads, value)) if loads]


def is_model_parallel(parameter: Tensor) -> bool:
    """Whether a parameter is marked as split: each model-parallel rank holds a different part."""
    return any(bool(getattr(parameter, mark, False)) for mark in _MARKS)


def copy_marks(source: Tensor, made: Tensor) -> None:
    """Copies the model-parallel marks of `source` to `made`, which replaces it."""
    for mark in _MARKS:
        if hasattr(source, mark):
            setattr(made, mark, getattr(source, mark))


def mark_tied(parameter: Tensor) -> None:
    """Marks a parameter of this pipeline stage that an earlier stage has, too."""
    setattr(parameter, _TIED, True)


def find_counted_elsewhere(model: nn.Module, world: World) -> set[str]:
    """Names of parameters that another rank of the same model includes in gradient norms: those that several ranks
    have. Otherwise the norm would count them once per rank.

    As in DeepSpeed and Megatron, only the first rank along `tensor` includes parameters without a model-parallel mark.
    Ranks along `context` have the same parameters. Pipeline stages only share those marked by `mark_tied`.
    """
    first = world.context.rank == 0

    def is_counted(parameter: Tensor) -> bool:
        whole = world.tensor.rank == 0 or is_model_parallel(parameter)
        return first and whole and not hasattr(parameter, _TIED)

    return {name for name, parameter in model.named_parameters() if not is_counted(parameter)}
