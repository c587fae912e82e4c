"""How a model is spread over the ranks: one strategy behind one protocol, chosen by ZeRO stage and world size."""

from torch import nn

from dsjob.compute.precision import Precision
from dsjob.contract.spec import Zero
from dsjob.parallel.replicated import Replicated
from dsjob.parallel.sharded import Sharded
from dsjob.parallel.strategy import Strategy as Strategy
from dsjob.ranks.mesh import World


def build_strategy(model: nn.Module, *, zero: Zero, world: World, precision: Precision) -> Strategy:
    """The strategy for a ZeRO stage. On one rank there is nothing to shard; parameters on the host come in by blocks.

    Raises UsageError for groups of ranks that do not divide the world size.
    """
    if zero.stage == 0 or (world.data_size == 1 and zero.offload != "param"):
        return Replicated(model, zero=zero, world=world, precision=precision)
    return Sharded(model, zero=zero, world=world, precision=precision)
