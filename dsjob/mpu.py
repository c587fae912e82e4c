"""Model-parallel units: what a program says of which ranks hold one model together, and which train on other data.

DeepSpeed's form is an object with get_{model,data}_parallel_{rank,world_size,group}(); Megatron calls the first half
get_tensor_model_parallel_*. How the parts of a model work together is the program's own matter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dsjob.errors import UsageError
from dsjob.mesh import ModelRanks, World

_METHODS = "get_data_parallel_{rank,world_size,group}() and get_model_parallel_{rank,world_size,group}()"
_MODEL = ("get_model_parallel_", "get_tensor_model_parallel_")
_MARKS = ("model_parallel", "tensor_model_parallel")  # DeepSpeed's and Megatron's attributes of parameters


def divide(world: World, mpu: Any) -> World:
    """`world`, all ranks of the job, as `mpu` divides them. Raises UsageError where it does not fit them."""
    if mpu is None:
        return world
    model = find_model_ranks(mpu)
    try:
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        group = mpu.get_data_parallel_group()
    except AttributeError as error:
        raise UsageError(f"the mpu lacks a method: {error}", hint=f"it needs {_METHODS}") from error
    if size * model.size != world.world_size:
        raise UsageError(
            f"the mpu speaks of {size} data-parallel x {model.size} model-parallel ranks, and the job has"
            f" {world.world_size}",
            hint="these have to multiply out: pipeline and sequence parallelism are not supported through an mpu",
        )
    if model.size == 1:
        return world
    found = dist.get_rank(group), dist.get_world_size(group)
    if found != (rank, size):
        raise UsageError(
            f"the mpu says that this is data-parallel rank {rank} of {size}, and its group that it is {found[0]} of"
            f" {found[1]}"
        )
    return dataclasses.replace(world, rank=rank, world_size=size, group=group, model=model)


def find_model_ranks(mpu: Any) -> ModelRanks:
    """What an mpu says of the ranks that hold one model; this rank alone where it says nothing."""
    for start in _MODEL:
        if hasattr(mpu, start + "group"):
            group = getattr(mpu, start + "group")()
            return ModelRanks(dist.get_rank(group), dist.get_world_size(group), group) if group else ModelRanks()
    return ModelRanks()


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
