"""`deepspeed.utils.groups`: how the most recent engine divides the ranks. Without an engine, all are data-parallel."""

from __future__ import annotations

import torch.distributed as _dist

from dsjob import checkpointing as _checkpointing
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.ranks.mesh import Ranks as _Ranks

_alone: list[tuple[object, _dist.ProcessGroup]] = []  # this rank's own group, beside the group of all ranks


def find_group(ranks: _Ranks) -> _dist.ProcessGroup | None:
    """The process group of `ranks`; None without process groups.

    A rank on its own gets a group of one. With None, a collective of the program would be one of all ranks.
    """
    if ranks.group is not None or not _dist.is_initialized():
        return ranks.group
    everyone = _dist.group.WORLD
    if ranks.size == _dist.get_world_size():
        return everyone
    if not _alone or _alone[0][0] is not everyone:
        _alone[:] = [(everyone, _dist.new_group([_dist.get_rank()], use_local_synchronization=True))]
    return _alone[0][1]


def _along(axis: str) -> _Ranks:
    world = _checkpointing.find_ranks()
    found: _Ranks = getattr(world, axis) if world is not None else _Ranks()
    return found


def _get_data_parallel_group() -> _dist.ProcessGroup | None:
    world = _checkpointing.find_ranks()
    return _dist.group.WORLD if world is None or world.data_group is None else world.data_group


def _get_data_parallel_world_size() -> int:
    return _dist.get_world_size(_get_data_parallel_group())


def _get_data_parallel_rank() -> int:
    return _dist.get_rank(_get_data_parallel_group())


def _get_model_parallel_world_size() -> int:
    return _along("model").size


def _get_model_parallel_rank() -> int:
    return _along("model").rank


def get_model_parallel_group() -> _dist.ProcessGroup | None:
    """The ranks that hold one copy of the model together."""
    return find_group(_along("model"))


def get_tensor_model_parallel_group() -> _dist.ProcessGroup | None:
    """The ranks that hold the other parts of the same layers."""
    return find_group(_along("tensor"))


def get_tensor_model_parallel_world_size() -> int:
    """The number of parts of each layer."""
    return _along("tensor").size


def get_tensor_model_parallel_rank() -> int:
    """This rank's part of each layer."""
    return _along("tensor").rank


def _get_sequence_parallel_group() -> _dist.ProcessGroup | None:
    return find_group(_along("context"))


def _get_sequence_parallel_world_size() -> int:
    return _along("context").size


def _get_sequence_parallel_rank() -> int:
    return _along("context").rank


def get_tensor_model_parallel_src_rank() -> int:
    """The first of the ranks that hold the parts of the same layers, among all ranks of the job."""
    group = _along("tensor").group
    return _dist.get_global_rank(group, 0) if group is not None else _dist.get_rank()


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = _get_model_parallel_rank

__getattr__ = _explain_names(__name__)
