"""Joins this rank with the others, as the section `launch` of a job says."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dsjob.contract.spec import Launch, Target
from dsjob.errors import LaunchError
from dsjob.ranks import loopback
from dsjob.ranks.mesh import World, join_world
from dsjob.trust.frames import put_at
from dsjob.trust.grant import Trust
from dsjob.trust.signatures import takes_keyword
from dsjob.trust.targets import build_callable

_PLACE = ("launch", "init_distributed")


def join(options: Launch, trust: Trust) -> World:
    """Joins the process group, by dsjob's own means or the user's. Raises LaunchError, TargetError; exceptions of the
    user's code pass through."""
    target = options.init_distributed
    initialize = None if target is None else _Initialize(target, trust)
    return join_world(device=options.device, backend=options.backend, timeout=options.timeout, initialize=initialize)


class _Initialize:
    """Calls the user's function with those arguments that its signature names."""

    def __init__(self, target: Target, trust: Trust) -> None:
        self._target, self._trust = target, trust

    def __call__(self, **given: Any) -> None:
        function = build_callable(self._target, ".".join(_PLACE), self._trust)
        loopback.install()
        try:
            function(**{name: value for name, value in given.items() if takes_keyword(function, name)})
            _check(given["rank"], given["world_size"])
        except Exception as error:
            put_at(error, (*_PLACE, "_target_"))
            raise


def _check(rank: int, world_size: int) -> None:
    found = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if found != (rank, world_size):
        left = f"as rank {found[0]} of {found[1]}" if found else "without a process group"
        raise LaunchError(
            f"launch.init_distributed: rank {rank} of {world_size} is {left}",
            hint="call torch.distributed.init_process_group with the arguments that it receives",
        )
