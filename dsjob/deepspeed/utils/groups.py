"""`deepspeed.utils.groups`: which ranks work on what. All of them are data-parallel."""

from __future__ import annotations

import torch.distributed as _dist


def _get_data_parallel_group() -> _dist.ProcessGroup | None:
    return _dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return _dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return _dist.get_rank()


def _get_model_parallel_world_size() -> int:
    return 1


def _get_model_parallel_rank() -> int:
    return 0


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = _get_model_parallel_rank
