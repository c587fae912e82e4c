"""`deepspeed.comm`: torch.distributed, whose names it has, with DeepSpeed's way to start it."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as _dist

from dsjob.entry import init_distributed as init_distributed


def is_available() -> bool:
    """Whether torch can communicate."""
    return _dist.is_available()


def is_initialized() -> bool:
    """Whether this process is in a group."""
    return _dist.is_initialized()


def get_local_rank() -> int:
    """This process's rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> _dist.ProcessGroup | None:
    """All ranks."""
    return _dist.group.WORLD


def __getattr__(name: str) -> Any:
    return getattr(_dist, name)
