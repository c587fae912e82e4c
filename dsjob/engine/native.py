"""Decides whether native ops step the optimizer, or compress what it sends; alike on all data-parallel ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from dsjob.errors import BuildError
from dsjob.ops import cpu_optimizers, onebit
from dsjob.ops.registry import OPS, Wish
from dsjob.optim.host import KERNELS, WORTHWHILE, can_step_on_host, prefer_kernels
from dsjob.optim.onebit.compressing import CompressingOptimizer
from dsjob.optim.onebit.own_gradients import count_ranks
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
    if _agree("cpu_optimizers", cpu_optimizers.find_problem(), wish, world, "step the optimizer on the host"):
        prefer_kernels(optimizer)


def choose_compression(optimizer: Optimizer, masters: Iterable[Tensor], wish: Wish, world: World) -> None:
    """Lets a 1-bit optimizer compress with a native op, if the document wishes so. A collective.

    The result is the same without it. Raises BuildError where it is required and a rank cannot have it.
    """
    if wish == "off":
        return
    if not isinstance(optimizer, CompressingOptimizer):
        if wish == "require":
            raise BuildError(
                f"ops.onebit: {type(optimizer).__name__} compresses nothing",
                hint="use OneBitAdam, OneBitLamb or ZeroOneAdam, or set auto",
            )
        return
    found = list(masters)
    worthwhile = count_ranks() > 1 and sum(master.numel() for master in found) >= WORTHWHILE
    if not found or not (worthwhile or wish == "require"):
        return
    problem = onebit.find_problem(found[0].device, build=wish == "require")
    optimizer.native = _agree("onebit", problem, wish, world, "compress momenta")


def _agree(op: str, problem: str, wish: Wish, world: World, what: str) -> bool:
    """Whether all data-parallel ranks can use an op. what: torch's operators do instead, for the warning."""
    problem = next(filter(None, all_gather(world.data, problem)), "")
    instead = OPS[op].instead
    if problem and wish == "require":
        raise BuildError(problem, hint=f"with ops.{op}=auto, dsjob uses {instead} instead")
    if problem and world.everyone.rank == 0:
        warnings.warn(f"{instead} {what}: {problem.splitlines()[0]}", stacklevel=3)
    return not problem
