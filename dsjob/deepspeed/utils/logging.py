"""`deepspeed.utils.logging`: the logger of dsjob, and messages of chosen ranks."""

from __future__ import annotations

import logging as _logging
from collections.abc import Sequence

import torch.distributed as _dist

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.errors import UsageError

logger = _logging.getLogger("dsjob")
LEVELS = ("debug", "info", "warning", "error", "critical")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = _logging.INFO) -> None:
    """Logs a message on the given ranks. Without ranks, or with -1 among them, logs on all ranks."""
    rank = _dist.get_rank() if _dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def set_log_level_from_string(log_level_str: str) -> None:
    """Sets the level of the logger to one of `LEVELS`, in lower or upper case. Raises UsageError for others."""
    if log_level_str.lower() not in LEVELS:
        raise UsageError(f"unknown log level {log_level_str!r}", hint=f"use one of {', '.join(LEVELS)}")
    logger.setLevel(log_level_str.upper())


__getattr__ = _explain_names(__name__)
