"""Decides which native ops a job uses: those for the optimizer alike on all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from dsjob.contract.spec import Ops
from dsjob.errors import BuildError
from dsjob.ops import cpu_optimizers, fused, lamb, onebit
from dsjob.ops.registry import OPS, Wish
from dsjob.ops.transformer import DeepSpeedTransformerLayer
from dsjob.optim.host import KERNELS, WORTHWHILE, can_step_on_host, prefer_kernels
from dsjob.optim.lamb import Lamb
from dsjob.optim.onebit.compressing import CompressingOptimizer
from dsjob.optim.onebit.own_gradients import count_ranks
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World
from dsjob.terminal import warn


def choose_ops(optimizer: Optimizer, masters: Iterable[Tensor], ops: Ops, world: World) -> None:
    """Chooses what steps the optimizer, and what compresses. A collective."""
    found = list(masters)
    _choose_kernels(optimizer, found, ops.cpu_optimizers, world)
    _choose_lamb(optimizer, found, ops.lamb, world)
    _choose_compression(optimizer, found, ops.onebit, world)


def _choose_kernels(optimizer: Optimizer, masters: Sequence[Tensor], wish: Wish, world: World) -> None:
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


def _choose_lamb(optimizer: Optimizer, masters: Sequence[Tensor], wish: Wish, world: World) -> None:
    """Lets Lamb step the masters that are on a GPU with fused kernels, if the document wishes so. A collective.

    All data-parallel ranks use them, or none. Raises BuildError where they are required and cannot be used.
    """
    if wish == "off":
        return
    if not isinstance(optimizer, Lamb) or not any(master.is_cuda for master in masters):
        if wish == "require":
            raise BuildError("ops.lamb: it steps Lamb for parameters on GPUs, of which there are none", hint="set auto")
        return
    # Nobody has to build it ahead, so its absence is not worth a warning.
    optimizer.native = _agree("lamb", lamb.find_problem(build=wish == "require"), wish, world, "")


def _choose_compression(optimizer: Optimizer, masters: Sequence[Tensor], wish: Wish, world: World) -> None:
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
    worthwhile = count_ranks() > 1 and sum(master.numel() for master in masters) >= WORTHWHILE
    if not masters or not (worthwhile or wish == "require"):
        return
    device = masters[0].device
    problem = onebit.find_problem(device, build=wish == "require")
    # Nobody has to build the op for GPUs ahead, so its absence is not worth a warning.
    what = "" if device.type == "cuda" else "compress momenta"
    optimizer.native = _agree("onebit", problem, wish, world, what)


def choose_layers(model: nn.Module, wish: Wish, world: World) -> None:
    """Lets the model's transformer layers use fused kernels, or not, if the document wishes so. A collective.

    Otherwise each layer has decided when it was built: it uses them on GPUs where they have been built ahead. Raises
    BuildError where they are required and a rank cannot have them.
    """
    if wish == "auto":
        return
    layers = [module for module in model.modules() if isinstance(module, DeepSpeedTransformerLayer)]
    if wish == "require":
        if not layers:
            raise BuildError(
                "ops.transformer: the model has no DeepSpeedTransformerLayer", hint="use some, or set auto"
            )
        if world.device.type != "cuda":
            raise BuildError("ops.transformer: its kernels need GPUs", hint="set auto")
        _agree("transformer", fused.find_problem(build=True), wish, world, "compute transformer layers")
    for layer in layers:
        layer.native = wish == "require"


def _agree(op: str, problem: str, wish: Wish, world: World, what: str) -> bool:
    """Whether all data-parallel ranks can use an op. what: torch's operators do instead, for the warning; if empty,
    there is none."""
    problem = next(filter(None, all_gather(world.data, problem)), "")
    instead = OPS[op].instead
    if problem and wish == "require":
        raise BuildError(problem, hint=f"with ops.{op}=auto, dsjob uses {instead} instead")
    if problem and what and world.everyone.rank == 0:
        reason = " ".join(line.strip() for line in problem.splitlines()[:2])  # with the compiler's first error
        warn(f"{instead} {what}: {reason}", stacklevel=3)
    return not problem
