"""Runs actions on several ranks together. An error on one rank is raised on all, so that none waits for ever.

Objects are exchanged with gloo, even if the ranks use NCCL, which would copy them through GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dsjob.errors import CheckpointError, DsjobError
from dsjob.ranks.mesh import Ranks
from dsjob.torch_private import make_group_of_hosts

T = TypeVar("T")
_of_hosts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()  # gloo groups, by NCCL group


def on_rank_0(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs `action` on rank 0. Returns its result, or raises its error, on every rank."""
    if ranks.size == 1:
        return action()
    # [result, error]. The other ranks wait in the broadcast below for as long as `action` takes on rank 0.
    answer: list[Any] = list(_try(0, action)) if ranks.rank == 0 else [None, None]
    dist.broadcast_object_list(answer, group=find_host_group(ranks), group_src=0)
    if answer[1] is not None:
        raise answer[1]
    return cast(T, answer[0])


def on_all_ranks(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs `action` on every rank, and returns its own result. If it fails anywhere, raises the error of the first
    failed rank on all."""
    if ranks.size == 1:
        return action()
    # The result stays on its rank; only errors are exchanged.
    result, error = _try(ranks.rank, action)
    for found in all_gather(ranks, error):
        if found is not None:
            raise found
    return cast(T, result)


def all_gather(ranks: Ranks, value: T) -> list[T]:
    """The values of all ranks, in rank order, on every rank."""
    if ranks.size == 1:
        return [value]
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, value, group=find_host_group(ranks))
    return found


def gather_on_rank_0(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Like `on_all_ranks`, but returns the results of all ranks, in rank order, on rank 0, and [] elsewhere."""
    result = on_all_ranks(ranks, action)
    if ranks.size == 1:
        return [result]
    results: list[Any] | None = [None] * ranks.size if ranks.rank == 0 else None
    dist.gather_object(result, results, group=find_host_group(ranks), group_dst=0)
    return results or []


def scatter(ranks: Ranks, action: Callable[[], list[T]]) -> T:
    """Runs `action` on rank 0, and returns to each rank its item of the result."""
    if ranks.size == 1:
        return action()[0]
    answer = _try(0, action) if ranks.rank == 0 else ([], None)
    # (item, error) for each rank: an error goes to all of them.
    pairs = [(item, None) for item in answer[0] or []] if answer[1] is None else [(None, answer[1])] * ranks.size
    received: list[Any] = [None]
    dist.scatter_object_list(received, pairs if ranks.rank == 0 else None, group=find_host_group(ranks), group_src=0)
    if received[0][1] is not None:
        raise received[0][1]
    return cast(T, received[0][0])


def as_told(rank: int, error: BaseException) -> DsjobError:
    """Converts an error for other ranks: one that can be pickled, and that names the rank."""
    if isinstance(error, DsjobError):
        return error
    return CheckpointError(f"rank {rank}: {type(error).__name__}: {error}")


def find_host_group(ranks: Ranks) -> dist.ProcessGroup:
    """The group for exchanging objects and tensors on the host among these ranks. The first call creates it, on all of
    them together."""
    group = ranks.group or dist.group.WORLD
    assert group is not None
    # This group has gloo for tensors on the host, so it can send objects itself.
    if "cpu:" in dist.get_backend_config(group):
        return group
    if group not in _of_hosts:
        _of_hosts[group] = make_group_of_hosts(group, timedelta(seconds=ranks.timeout))
    return _of_hosts[group]


def _try(rank: int, action: Callable[[], T]) -> tuple[T | None, DsjobError | None]:
    try:
        return action(), None
    except Exception as error:  # of any type: the other ranks wait for the result, and must learn of the error
        return None, as_told(rank, error)
