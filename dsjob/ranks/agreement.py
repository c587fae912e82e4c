"""What ranks do together: an error of one is raised on all, so that none waits for another for ever.

Objects travel from host to host: NCCL would take them through the memory of GPUs, so there gloo carries them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _new_process_group_helper, _world

from dsjob.errors import CheckpointError, DsjobError
from dsjob.ranks.mesh import Ranks

T = TypeVar("T")
_of_hosts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()  # by one of the same ranks


def on_rank_0(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 and gives its result, or raises its error, on every rank."""
    if ranks.size == 1:
        return action()
    answer: list[Any] = list(_try(0, action)) if ranks.rank == 0 else [None, None]
    dist.broadcast_object_list(answer, group=_find_group(ranks), group_src=0)
    if answer[1] is not None:
        raise answer[1]
    return cast(T, answer[0])


def on_all_ranks(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs `action` on every rank; its result there, or on every rank the error of the first that has one."""
    if ranks.size == 1:
        return action()
    result, error = _try(ranks.rank, action)
    for found in all_gather(ranks, error):
        if found is not None:
            raise found
    return cast(T, result)


def all_gather(ranks: Ranks, value: T) -> list[T]:
    """`value` of each rank, in their order, on every rank."""
    if ranks.size == 1:
        return [value]
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, value, group=_find_group(ranks))
    return found


def gather_on_rank_0(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """As `on_all_ranks`; gives rank 0 the results of all, in their order, and nothing to the others."""
    result = on_all_ranks(ranks, action)
    if ranks.size == 1:
        return [result]
    results: list[Any] | None = [None] * ranks.size if ranks.rank == 0 else None
    dist.gather_object(result, results, group=_find_group(ranks), group_dst=0)
    return results or []


def scatter(ranks: Ranks, action: Callable[[], list[T]]) -> T:
    """Runs `action` on rank 0 and gives each rank its own of the results."""
    if ranks.size == 1:
        return action()[0]
    answer = _try(0, action) if ranks.rank == 0 else ([], None)
    pairs = [(item, None) for item in answer[0] or []] if answer[1] is None else [(None, answer[1])] * ranks.size
    received: list[Any] = [None]
    dist.scatter_object_list(received, pairs if ranks.rank == 0 else None, group=_find_group(ranks), group_src=0)
    if received[0][1] is not None:
        raise received[0][1]
    return cast(T, received[0][0])


def as_told(rank: int, error: BaseException) -> DsjobError:
    """An error as other ranks are to hear of it."""
    if isinstance(error, DsjobError):
        return error
    return CheckpointError(f"rank {rank}: {type(error).__name__}: {error}")


def _find_group(ranks: Ranks) -> dist.ProcessGroup:
    """The group that carries objects among these ranks; it is made, by all of them together, with the first object."""
    group = ranks.group or dist.group.WORLD
    assert group is not None
    if "cpu:" in dist.get_backend_config(group):
        return group
    if group not in _of_hosts:
        _of_hosts[group] = _make_group_of_hosts(group, timedelta(seconds=ranks.timeout))
    return _of_hosts[group]


def _make_group_of_hosts(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of the same ranks, whose name follows from that of `group`.

    Only these ranks make it. `dist.new_group` would name it by how many groups each of them is in, which may differ:
    ranks with other names wait for one another in vain.
    """
    ranks = dist.get_process_group_ranks(group)
    name: Any = f"{group.group_name}/hosts"
    made, _ = _new_process_group_helper(
        len(ranks), group.rank(), ranks, "gloo", _get_default_store(), name, timeout=timeout
    )
    _world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, made)


def _try(rank: int, action: Callable[[], T]) -> tuple[T | None, DsjobError | None]:
    try:
        return action(), None
    except Exception as error:  # the other ranks are waiting: they have to hear of it
        return None, as_told(rank, error)
