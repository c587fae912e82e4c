"""Spreads a model over ranks: strategies with one protocol, chosen by ZeRO stage and number of ranks."""

from torch import nn

from dsjob.compute.precision import Precision
from dsjob.contract.spec import Aio, Zero
from dsjob.parallel.again import note_parameters, remember, take_over
from dsjob.parallel.held_sums import HeldSums
from dsjob.parallel.masters import open_disk
from dsjob.parallel.pipeline.passes import StagePasses
from dsjob.parallel.presharded import announce_whole
from dsjob.parallel.replicated import Replicated
from dsjob.parallel.sharded import Sharded
from dsjob.parallel.strategy import Strategy as Strategy
from dsjob.parallel.tensor.divide import Divided
from dsjob.ranks.mesh import World
from dsjob.ranks.splits import mark_split


def build_strategy(
    model: nn.Module,
    *,
    zero: Zero,
    world: World,
    precision: Precision,
    aio: Aio,
    pipeline: StagePasses | None = None,
    divided: Divided = Divided(),  # noqa: B008 (immutable)
) -> Strategy:
    """The strategy for a ZeRO stage. On one rank nothing is sharded, except to load offloaded parameters by block.

    pipeline: runs the passes, if `model` is only a stage of one. divided: of `model`, by tensor parallelism.

    Raises UsageError if the number of ranks does not divide into the groups of MiCS or hpZ, or if an earlier engine has
    sharded the model in another way,
    StorageError if the folder for state on a disk cannot be used.
    """
    earlier = take_over(model, zero, precision)
    if earlier is not None:
        return earlier
    # A model without anything to train, such as one that is evaluated, must not need the disk of the optimizer.
    disk = open_disk(zero, aio, trains=any(parameter.requires_grad for parameter in model.parameters()))
    strategy: Strategy
    if zero.stage == 0 or (world.data_size == 1 and zero.offload != "param"):
        interleaved = pipeline is not None
        strategy = Replicated(model, zero=zero, world=world, precision=precision, disk=disk, interleaved=interleaved)
        if zero.stage == 3:
            announce_whole(model)
    else:
        originals = note_parameters(model)
        strategy = Sharded(model, zero=zero, world=world, precision=precision, disk=disk)
        remember(strategy, zero, precision, originals)
    held = precision.held(zero.stage)
    if held is not None and not (isinstance(strategy, Replicated) and held == precision.compute):
        strategy.held = HeldSums(held)
    strategy.splits, strategy.partial = divided.splits, divided.partial
    for name, split in divided.splits.items():
        if name in strategy.masters:
            mark_split(strategy.masters[name], split)
    if pipeline is not None:
        strategy.pipeline = pipeline
        pipeline.align_tied(strategy.weights())
        pipeline.count(strategy)
        strategy.weights_changed()
    return strategy
