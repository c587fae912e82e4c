"""`deepspeed.comm`: all names of torch.distributed, plus DeepSpeed's `init_distributed`."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as _dist
from torch import Tensor

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.engine.build import init_distributed as init_distributed


def is_available() -> bool:
    """Whether torch was built with torch.distributed."""
    return _dist.is_available()


def is_initialized() -> bool:
    """Whether this process has joined a process group."""
    return _dist.is_initialized()


def get_local_rank() -> int:
    """This process's rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> _dist.ProcessGroup | None:
    """The process group of all ranks."""
    return _dist.group.WORLD


def get_all_ranks_from_group(group: _dist.ProcessGroup | None = None) -> list[int]:
    """The ranks of a group, as numbers in the job; of all by default."""
    return _dist.get_process_group_ranks(group)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: _dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Like torch's function, but also gathers scalars, by reshaping them to one element; gloo rejects scalars."""
    given = input_tensor.reshape(1) if input_tensor.dim() == 0 else input_tensor
    return _dist.all_gather_into_tensor(output_tensor, given, group=group, async_op=async_op)


def inference_all_reduce(
    tensor: Tensor, op: Any = _dist.ReduceOp.SUM, group: _dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """torch's `all_reduce`. DeepSpeed has another kernel for small tensors, with the same result."""
    return _dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


__path__ = _stand_for(__name__, "comm")
__getattr__ = _explain_names(__name__, lambda name: getattr(_dist, name))
