"""How a model is spread over the ranks: one strategy behind one protocol, chosen by ZeRO stage and world size."""

from torch import nn

from dsjob.mesh import World
from dsjob.parallel.base import Strategy as Strategy
from dsjob.parallel.replicated import Replicated
from dsjob.parallel.sharded import Sharded
from dsjob.precision import Precision


def build_strategy(model: nn.Module, *, stage: int, world: World, precision: Precision) -> Strategy:
    """The strategy for a ZeRO stage. On one rank there is nothing to shard, whatever the stage."""
    if stage == 0 or world.world_size == 1:
        return Replicated(model, world=world, precision=precision)
    return Sharded(model, stage=stage, world=world, precision=precision)
