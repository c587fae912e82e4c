"""A sharded model that a program gives to a new engine, as after a phase of training: the shards stay where they are.

The new engine takes the strategy of the earlier one, with a new optimizer over the same masters. Unsharding
the model would need whole parameters on each rank, and private names of FSDP2.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dsjob.compute.precision import Precision
from dsjob.contract.spec import Zero
from dsjob.errors import UsageError
from dsjob.parallel.sharded import Sharded
from dsjob.ranks.mesh import World

# In a model's `__dict__`: a table of models could not be weak, since a strategy keeps its model.
_KEY = "_dsjob_sharded"


class _Sharded(NamedTuple):
    strategy: Sharded
    zero: Zero
    precision: Precision
    originals: Mapping[str, weakref.ref[nn.Parameter]]  # the whole parameters, which the shards have replaced, by name


def note_parameters(model: nn.Module) -> Mapping[str, weakref.ref[nn.Parameter]]:
    """The parameters of a model by name. They stay no longer than the program keeps them."""
    return {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}


def remember(
    strategy: Sharded, zero: Zero, precision: Precision, originals: Mapping[str, weakref.ref[nn.Parameter]]
) -> None:
    """Records in the model how it was sharded. originals: `note_parameters` of the model before that."""
    strategy.module.__dict__[_KEY] = _Sharded(strategy, zero, precision, originals)


def name_parameters(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters by their ids; also of those that an earlier engine has replaced by shards."""
    found = cast("_Sharded | None", model.__dict__.get(_KEY))
    pairs = [(ref(), name) for name, ref in found.originals.items()] if found is not None else []
    before = {id(parameter): name for parameter, name in pairs if parameter is not None}
    return before | {id(parameter): name for name, parameter in model.named_parameters()}


def refuse_parts(model: nn.Module, world: World) -> None:
    """Raises UsageError for a model that another engine has sharded a part of, or that ranks divide."""
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if sharded and (_KEY not in model.__dict__ or world.model.size > 1):
        raise UsageError(
            "the model, or a part of it, is already sharded by another engine",
            hint="create a new model for each engine; models that share parts must use the same engine",
        )


def take_over(model: nn.Module, zero: Zero, precision: Precision) -> Sharded | None:
    """The strategy of the engine that had `model` before, ready for a new one; None if there was none.

    Raises UsageError if the model cannot stay sharded as it is.
    """
    found = cast("_Sharded | None", model.__dict__.get(_KEY))
    if found is None:
        return None
    differs = {
        "another zero_optimization": found.zero != zero,
        "another precision": found.precision != precision,
        "other parameters": found.originals.keys() != {name for name, _ in model.named_parameters()},
        "state on a disk": found.strategy.disk is not None or zero.parameters_on_disk,
    }
    for what, is_so in differs.items():
        if is_so:
            raise UsageError(
                f"the model is already sharded by an earlier engine, and cannot be given to a new one with {what}",
                hint="create a new model, and load the weights from a checkpoint of the earlier engine",
            )
    found.strategy.begin_again()
    return found.strategy
