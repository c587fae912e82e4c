"""Lets a program call a part of a sharded model by itself, as `generate` calls the encoder of a T5.

FSDP2 gathers the parameters outside all blocks when the whole model is called. A call of a part of it would find shards
there. Large blocks, at stage 3 all, gather their own parameters whoever calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dsjob.torch_private.fsdp import begin_calls, is_gathered, list_owners


def allow_partial_calls(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Makes modules outside the blocks gather the parameters of the root unit when they are called with shards.

    model: after `fully_shard`. The parameters stay gathered until the strategy frees them. All ranks must call the same
    part. Inside blocks there are no hooks: they would cost time in every call, and break the graphs of compiled blocks.
    """
    root = cast(FSDPModule, model)

    def gather(module: nn.Module, given: Any) -> None:
        if not is_gathered(root):
            begin_calls(root)  # else FSDP2 would take the first unit that is called for the whole model
            root.unshard()

    eager = torch.compiler.disable(gather)  # type: ignore[no-untyped-call]
    inside = {module for block in blocks for module in block.modules()} | {model}
    for owner in list_owners(root):
        if owner not in inside:
            owner.register_forward_pre_hook(eager)
