"""`deepspeed.utils.groups`: the data-parallel and model-parallel groups, from the mpu of the most recent engine.

Without an mpu, all ranks are data-parallel.
"""

from __future__ import annotations

import torch.distributed as _dist

from dsjob import checkpointing as _checkpointing
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.ranks.mesh import Ranks as _Ranks


def _model_ranks() -> _Ranks:
    world = _checkpointing.find_ranks()
    return world.model if world is not None else _Ranks()


def _get_data_parallel_group() -> _dist.ProcessGroup | None:
    world = _checkpointing.find_ranks()
    return _dist.group.WORLD if world is None or world.data_group is None else world.data_group


def _get_data_parallel_world_size() -> int:
    return _dist.get_world_size(_get_data_parallel_group())


def _get_data_parallel_rank() -> int:
    return _dist.get_rank(_get_data_parallel_group())


def _get_model_parallel_world_size() -> int:
    return _model_ranks().size


def _get_model_parallel_rank() -> int:
    return _model_ranks().rank


def _tensor_ranks() -> _Ranks:
    world = _checkpointing.find_ranks()
    return world.tensor if world is not None else _Ranks()


def get_tensor_model_parallel_group() -> _dist.ProcessGroup | None:
    """The ranks among which the most recent engine divides layers."""
    return _tensor_ranks().group


def get_tensor_model_parallel_world_size() -> int:
    """Their number."""
    return _tensor_ranks().size


def get_tensor_model_parallel_rank() -> int:
    """This rank's position among them."""
    return _tensor_ranks().rank


def get_tensor_model_parallel_src_rank() -> int:
    """The first of them, among all ranks of the job."""
    group = _tensor_ranks().group
    return _dist.get_global_rank(group, 0) if group is not None else _dist.get_rank()


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = _get_model_parallel_rank

__getattr__ = _explain_names(__name__)
