"""Model-parallel units: what a program says of which ranks hold one model together, and which train on other data.

DeepSpeed's form is an object with get_{model,data}_parallel_{rank,world_size,group}(); Megatron calls the first half
get_tensor_model_parallel_*. Determined's is an object of four fields, without groups, which are then made here. How the
parts of a model work together is the program's own matter.

Code that shards, reduces or counts samples needs to know no more than `World`'s data_rank, data_size and data_group.
The parts of a model are never cut anew: a checkpoint names them `mp_rank_00`, ... and loads with as many parts. An
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

from dsjob.errors import DataError, UsageError
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import Ranks, World

T = TypeVar("T")
_METHODS = "get_data_parallel_{rank,world_size,group}() and get_model_parallel_{rank,world_size,group}()"
_FIELDS = "data_parallel_rank, data_parallel_world_size, should_report_metrics, should_build_dataloader"
_MODEL = ("get_model_parallel_", "get_tensor_model_parallel_")
_MARKS = ("model_parallel", "tensor_model_parallel")  # DeepSpeed's and Megatron's attributes of parameters


class ModelParallelUnit:
    """Determined's form: what this rank does. Its last field has two spellings there."""

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
            raise UsageError("should_build_dataloader and should_build_data_loader say different things")
        self.data_parallel_rank, self.data_parallel_world_size = data_parallel_rank, data_parallel_world_size
        self.should_report_metrics = should_report_metrics
        self.should_build_dataloader = self.should_build_data_loader = said != {False}


class _Said(NamedTuple):
    """What a rank's unit says, for the other ranks to know."""

    rank: int  # data-parallel
    size: int
    reports: bool
    loads: bool
    has_groups: bool


def divide(world: World, mpu: Any) -> World:
    """`world`, all ranks of the job, as `mpu` divides them. All ranks call it, each with its own.

    Raises UsageError, on all ranks alike where they can know, for what does not fit them.
    """
    if mpu is None:
        return world
    everyone = _make_together(lambda: _read(mpu), world)
    said = everyone[world.everyone.rank]
    _require_duties(everyone)
    if said.has_groups:
        model, group = find_model_ranks(mpu), mpu.get_data_parallel_group()
    else:
        model, group = _form_groups(everyone, world.timeout)
    places = _make_together(lambda: _find_place(said, model, group, world), world)
    world = dataclasses.replace(world, reports=said.reports, loads=said.loads)
    if model.size == 1:
        return world
    return dataclasses.replace(
        world,
        data_rank=said.rank,
        data_size=said.size,
        data_group=group,
        model=dataclasses.replace(model, timeout=world.timeout),
        order=_order_ranks(places, model.size),
    )


def read_data_ranks(mpu: Any) -> tuple[int, int]:
    """The data-parallel rank of this process and their number, as an mpu of either form says. Raises UsageError."""
    unit = _read_fields(mpu)
    return _call_for_ranks(mpu) if unit is None else (unit.data_parallel_rank, unit.data_parallel_world_size)


def _read(mpu: Any) -> _Said:
    unit = _read_fields(mpu)
    source: Any = unit or mpu
    builds = [bool(getattr(source, f"should_build_{name}", True)) for name in ("dataloader", "data_loader")]
    reports = bool(getattr(source, "should_report_metrics", True))
    return _Said(*read_data_ranks(mpu), reports, all(builds), unit is None)


def _find_place(said: _Said, model: Ranks, group: dist.ProcessGroup | None, world: World) -> tuple[int, int]:
    """The data-parallel rank of this process, and its rank in its model. Raises UsageError where sizes do not fit."""
    if said.size * model.size != world.everyone.size:
        raise UsageError(
            f"the mpu speaks of {said.size} data-parallel x {model.size} model-parallel ranks, and the job has"
            f" {world.everyone.size}",
            hint="these have to multiply out: pipeline and sequence parallelism are not supported through an mpu",
        )
    if model.size == 1:
        return said.rank, 0
    found = dist.get_rank(group), dist.get_world_size(group)
    if found != (said.rank, said.size):
        raise UsageError(
            f"the mpu says that this is data-parallel rank {said.rank} of {said.size}, and its group that it is"
            f" {found[0]} of {found[1]}"
        )
    return said.rank, model.rank


def _order_ranks(places: list[tuple[int, int]], size: int) -> tuple[int, ...]:
    """The job's ranks by their places: rank m of model d is number d * `size` + m. `places`: (d, m) of each rank."""
    order: dict[int, int] = {}
    for rank, (data, model) in enumerate(places):
        other = order.setdefault(data * size + model, rank)
        if other != rank:
            raise UsageError(
                f"the mpus of ranks {other} and {rank} both say data-parallel rank {data} and model-parallel rank"
                f" {model}"
            )
    return tuple(order[place] for place in range(len(order)))


def _make_together(make: Callable[[], T], world: World) -> list[T]:
    """What `make` gives on each rank of the job. Where it raises on one, all raise, and none waits for that one."""
    made: Any = None
    own: Exception | None = None
    try:
        made = make()
    except Exception as error:
        own = error
    everyone = all_gather(world.everyone, (made, own and str(own)))
    if own is not None:
        raise own
    for rank, (_, fault) in enumerate(everyone):
        if fault is not None:
            raise UsageError(f"rank {rank}: {fault}")
    return [each for each, _ in everyone]


def _read_fields(mpu: Any) -> ModelParallelUnit | None:
    """Determined's four fields; None for an object with methods."""
    if isinstance(mpu, Mapping):
        try:
            return ModelParallelUnit(**mpu)
        except TypeError as error:
            raise UsageError(f"the mpu is a dict of other keys: {error}", hint=f"it needs {_FIELDS}") from error
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
        raise UsageError(f"the ranks' mpus say different data-parallel world sizes: {', '.join(map(str, sizes))}")
    if not any(said.reports for said in everyone):
        raise UsageError("no rank's mpu reports metrics", hint="should_report_metrics=True on one of them")
    idle = {said.rank for said in everyone} - {said.rank for said in everyone if said.loads}
    if idle:
        raise UsageError(
            f"no rank builds the loader of data-parallel rank {min(idle)}: its samples would be read by nobody",
            hint="should_build_dataloader=True on one of its ranks",
        )


def _form_groups(everyone: list[_Said], timeout: float) -> tuple[Ranks, dist.ProcessGroup | None]:
    """Groups for fields: ranks that share a data-parallel rank hold one model, and those of one place in it share data.

    A collective: every rank makes all groups.
    """
    size = everyone[0].size
    models = [[number for number, said in enumerate(everyone) if said.rank == data] for data in range(size)]
    lengths = {len(members) for members in models}
    if len(lengths) > 1 or sum(map(len, models)) != len(everyone):
        told = ", ".join(str(said.rank) for said in everyone)
        raise UsageError(
            f"the ranks' mpus say data-parallel ranks {told} of {size}",
            hint=f"each of 0 to {size - 1} has to be that of equally many ranks",
        )
    if lengths == {1}:
        return Ranks(), None
    columns = [list(members) for members in zip(*models, strict=True)]
    allowed = timedelta(seconds=timeout)
    model, data = (dist.new_subgroups_by_enumeration(groups, timeout=allowed)[0] for groups in (models, columns))  # type: ignore[no-untyped-call]
    return Ranks(dist.get_rank(model), dist.get_world_size(model), model), data


def find_model_ranks(mpu: Any) -> Ranks:
    """What an mpu says of the ranks that hold one model; this rank alone where it says nothing."""
    for start in _MODEL:
        if hasattr(mpu, start + "group"):
            group = getattr(mpu, start + "group")()
            return Ranks(dist.get_rank(group), dist.get_world_size(group), group) if group else Ranks()
    return Ranks()


def share(value: T, world: World) -> T:
    """`value` as the first rank has it that holds the same model and builds a loader. A collective of these."""
    return _gather_read(value, world)[0]


def share_length(length: T, world: World, unit: str) -> T:
    """As `share`. Raises DataError on all of these where those that build a loader have other lengths.

    `unit`: what is counted, for the message.
    """
    lengths = _gather_read(length, world)
    other = next((each for each in lengths if each != lengths[0]), lengths[0])
    if other != lengths[0]:
        raise DataError(
            f"ranks that hold one model have {lengths[0]} and {other} {unit}",
            hint="build the same dataset on each of them, or on one alone (should_build_dataloader)",
        )
    return lengths[0]


def _gather_read(value: T, world: World) -> list[T]:
    """`value` of the ranks that hold the same model and build a loader, in order."""
    if world.model.size == 1:
        return [value]
    return [given for loads, given in all_gather(world.model, (world.loads, value)) if loads]


def is_model_parallel(parameter: Tensor) -> bool:
    """Whether a parameter is said to be another part of the model on each model-parallel rank."""
    return any(bool(getattr(parameter, mark, False)) for mark in _MARKS)


def copy_marks(source: Tensor, made: Tensor) -> None:
    """Says of `made`, which takes the place of `source`, what was said of that."""
    for mark in _MARKS:
        if hasattr(source, mark):
            setattr(made, mark, getattr(source, mark))


def find_counted_elsewhere(model: nn.Module, world: World) -> set[str]:
    """Names of parameters that are the same on all model-parallel ranks, and that another rank counts in norms.

    As DeepSpeed and Megatron have it: the first rank counts those that are not said to be model-parallel.
    """
    if world.model.rank == 0:
        return set()
    return {name for name, parameter in model.named_parameters() if not is_model_parallel(parameter)}
