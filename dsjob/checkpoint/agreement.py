"""What ranks do together: an error of one is raised on all, so that none waits for another for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from dsjob.errors import CheckpointError, DsjobError
from dsjob.mesh import World

T = TypeVar("T")


def on_rank_0(world: World, action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 and gives its result, or raises its error, on every rank."""
    if world.world_size == 1:
        return action()
    answer: list[Any] = list(_try(0, action)) if world.rank == 0 else [None, None]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return cast(T, answer[0])


def on_all_ranks(world: World, action: Callable[[], T]) -> T:
    """Runs `action` on every rank; its result there, or on every rank the error of the first that has one."""
    return cast(T, gather(world, action, own=True))


def on_each_rank(world: World, read: Callable[[], T]) -> list[T]:
    """What `read`, which does not fail, gives on each rank; all of it on every rank."""
    if world.world_size == 1:
        return [read()]
    found: list[Any] = [None] * world.world_size
    dist.all_gather_object(found, read())
    return found


def gather(world: World, action: Callable[[], T], *, own: bool = False) -> Any:
    """As `on_all_ranks`; gives rank 0 the results of all, in their order, and nothing to the others."""
    if world.world_size == 1:
        return action() if own else [action()]
    result, error = _try(world.rank, action)
    for found in on_each_rank(world, lambda: error):
        if found is not None:
            raise found
    if own:
        return result
    results: list[Any] | None = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(result, results, dst=0)
    return results or []


def scatter(world: World, action: Callable[[], list[T]]) -> T:
    """Runs `action` on rank 0 and gives each rank its own of the results."""
    if world.world_size == 1:
        return action()[0]
    answer = _try(0, action) if world.rank == 0 else ([], None)
    pairs = [(item, None) for item in answer[0] or []] if answer[1] is None else [(None, answer[1])] * world.world_size
    received: list[Any] = [None]
    dist.scatter_object_list(received, pairs if world.rank == 0 else None, src=0)
    if received[0][1] is not None:
        raise received[0][1]
    return cast(T, received[0][0])


def as_told(rank: int, error: BaseException) -> DsjobError:
    """An error as other ranks are to hear of it."""
    if isinstance(error, DsjobError):
        return error
    return CheckpointError(f"rank {rank}: {type(error).__name__}: {error}")


def _try(rank: int, action: Callable[[], T]) -> tuple[T | None, DsjobError | None]:
    try:
        return action(), None
    except Exception as error:  # the other ranks are waiting: they have to hear of it
        return None, as_told(rank, error)
