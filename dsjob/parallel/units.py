"""Divides a model into the units of FSDP2: a unit gathers its parameters and reduces their gradients at once."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dsjob.compute.autocast import DEFAULT_SAFE_MODULES, mark
from dsjob.compute.find_blocks import find_blocks, find_units
from dsjob.compute.precision import Precision
from dsjob.contract.sharding import choose_ahead, stands_alone
from dsjob.contract.spec import Zero
from dsjob.parallel.strategy import mark_safe


def shard(model: nn.Module, zero: Zero, precision: Precision, options: dict[str, Any]) -> list[nn.Module]:
    """Shards `model` in place: its fp32 modules and its blocks as units of their own, then the rest as one unit.

    Returns its blocks, also those that are too small for units of their own.
    """
    # param_dtype: of the gathered copies. reduce_dtype: of gradients between ranks. Shards keep their own dtype,
    # usually fp32, and the gradients that they receive have it too.
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    # Inner units first, the root last: fully_shard takes the parameters that no unit inside has taken.
    for safe in mark_safe(model, precision):
        _shard_safe(safe, options, precision.autocast)
    for unit in find_units(model) if zero.stage == 3 else ():
        if not isinstance(unit, FSDPModule):
            fully_shard(unit, mp_policy=policy, **options)
    found = find_blocks(model)
    blocks = [b for b in found if stands_alone(sum(p.numel() for p in b.parameters()), zero.stage)]
    for block in blocks:
        if not isinstance(block, FSDPModule):
            _hide_view_warning(block)
            fully_shard(block, mp_policy=policy, **options)
    if zero.stage == 3 and zero.stage3_prefetch_bucket_size:
        _prefetch(blocks, zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters)
    # Parameters outside the blocks are used at both ends of the model. Freeing them in between would gather them
    # twice.
    fully_shard(model, mp_policy=policy, **{**options, "reshard_after_forward": False})
    return found


def _hide_view_warning(block: nn.Module) -> None:
    """Hides FSDP2's warning of blocks that return a view, which must not be changed in place: T5's also return their
    position bias. The models of transformers do not change it, and their users do not see it."""
    kind = type(block)
    if kind.__module__.startswith("transformers."):
        text = rf"FSDP2-wrapped module \(FSDP{kind.__name__}\) returned a view tensor"
        warnings.filterwarnings("ignore", text, UserWarning)


def _shard_safe(module: nn.Module, options: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Shards a module whose gradients are reduced in `dtype`. At stage 3, as in DeepSpeed, its parameters are gathered
    in it too.

    It is a unit of its own, because a unit has one dtype, and a unit of several modules reduces only when all were
    used.
    """
    # Gather only linear and convolution layers in it: autocast lowers their inputs anyway, but other operators may not
    # accept parameters and inputs of different dtypes.
    gathers_low = options["reshard_after_forward"] and type(module) in DEFAULT_SAFE_MODULES
    low = MixedPrecisionPolicy(
        param_dtype=dtype if gathers_low else None, reduce_dtype=dtype, cast_forward_inputs=False
    )
    fully_shard(module, mp_policy=low, **options)
    for parameter in module.parameters():
        mark(parameter, cast(torch.dtype, dtype))


def _prefetch(blocks: list[nn.Module], bucket: int, live: int | None) -> None:
    """Gathers several blocks ahead of their use, in both directions. FSDP2 does so with one block by default."""
    for order in (blocks, blocks[::-1]):
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in order]
        for number, ahead in enumerate(choose_ahead(sizes, bucket, live)):
            following = cast("list[FSDPModule]", order[number + 1 : number + 1 + ahead])
            unit = cast(FSDPModule, order[number])
            set_next = (
                unit.set_modules_to_forward_prefetch if order is blocks else unit.set_modules_to_backward_prefetch
            )
            if ahead > 1:
                set_next(following)
