"""Spreads a model over ranks: strategies with one protocol, chosen by ZeRO stage and number of ranks."""

from torch import nn

from dsjob.compute.precision import Precision
from dsjob.contract.spec import Aio, Zero
from dsjob.parallel.masters import open_disk
from dsjob.parallel.replicated import Replicated
from dsjob.parallel.sharded import Sharded
from dsjob.parallel.strategy import Strategy as Strategy
from dsjob.ranks.mesh import World


def build_strategy(model: nn.Module, *, zero: Zero, world: World, precision: Precision, aio: Aio) -> Strategy:
    """The strategy for a ZeRO stage. On one rank nothing is sharded, except to load offloaded parameters by block.

    Raises UsageError if the number of ranks does not divide into the groups of MiCS or hpZ,
    StorageError if the folder for state on a disk cannot be used.
    """
    # A model without anything to train, such as one that is evaluated, must not need the disk of the training.
    disk = open_disk(zero, aio) if any(parameter.requires_grad for parameter in model.parameters()) else None
    if zero.stage == 0 or (world.data_size == 1 and zero.offload != "param"):
        return Replicated(model, zero=zero, world=world, precision=precision, disk=disk)
    return Sharded(model, zero=zero, world=world, precision=precision, disk=disk)
