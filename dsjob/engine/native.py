"""Decides whether native kernels step the optimizer, alike on all ranks that hold the same parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from dsjob.errors import BuildError
from dsjob.ops import cpu_optimizers
from dsjob.ops.registry import OPS, Wish
from dsjob.optim.host import KERNELS, WORTHWHILE, can_step_on_host, prefer_kernels
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World


def choose_kernels(optimizer: Optimizer, masters: Iterable[Tensor], wish: Wish, world: World) -> None:
    """Lets kernels step the masters that are on the host, if the document wishes so. A collective.

    Replicas must not differ, so all data-parallel ranks use the kernels, or none. Raises BuildError where they are
    required and a rank cannot have them.
    """
    elements = sum(master.numel() for master in masters if master.device.type == "cpu")  # of all shards together
    if wish == "off" or not (elements >= WORTHWHILE or (wish == "require" and elements)):
        return
    if not can_step_on_host(optimizer):
        if wish == "require":
            kinds = ", ".join(sorted(kind.__name__ for kind in KERNELS))
            raise BuildError(
                f"ops.cpu_optimizers: there is no kernel for {type(optimizer).__name__} as it is configured",
                hint=f"there are kernels for {kinds}, without amsgrad, maximize and hooks; or set auto",
            )
        return
    problems = all_gather(world.data, cpu_optimizers.find_problem())
    problem = next(filter(None, problems), "")
    if not problem:
        prefer_kernels(optimizer)
    elif wish == "require":
        instead = OPS["cpu_optimizers"].instead
        raise BuildError(problem, hint=f"with ops.cpu_optimizers=auto, dsjob uses {instead} instead")
    elif world.everyone.rank == 0:
        first = problem.splitlines()[0]
        warnings.warn(f"{OPS['cpu_optimizers'].instead} step the optimizer on the host: {first}", stacklevel=2)
