"""ZeRO stages 1 to 3 on FSDP2: fp32 masters sharded over the ranks, compute copies gathered block by block.

stage  gradients                                        parameters
1      kept whole while accumulating, reduce-scattered   gathered once a step
       at the boundary
2      reduce-scattered every micro step                 gathered once a step
3      reduce-scattered every micro step                 gathered for each use, block by block
"""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dsjob.mesh import World
from dsjob.parallel.base import Strategy
from dsjob.parallel.wrap import find_blocks
from dsjob.precision import Precision


class Sharded(Strategy):
    """The repeated blocks of a model, and what remains, each sharded as one unit."""

    def __init__(self, model: nn.Module, *, stage: int, world: World, precision: Precision) -> None:
        self._stage = stage
        self._boundary: bool | None = None
        _agree(model, world)
        mesh = world.make_mesh()
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
        for block in find_blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
        # What is outside the blocks is used at both ends of the model: freeing it in between would gather it twice.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.module = model
        self.masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._all = dict(model.named_parameters())
        self._buffers = list(model.buffers())
        self._buffers_differ = True
        self._evaluated = False

    def start_micro_step(self, boundary: bool) -> None:
        if self._buffers_differ and self._buffers:
            # As DDP does: each step begins with rank 0's buffers, so that one checkpoint speaks for all ranks.
            _broadcast_coalesced(_get_default_group(), self._buffers, 25 << 20, 0)
            self._buffers_differ = False
        if boundary == self._boundary:
            return
        self._boundary = boundary
        root = cast(FSDPModule, self.module)
        if self._stage == 1:
            root.set_requires_gradient_sync(boundary)
        if self._stage < 3:
            root.set_reshard_after_backward(boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluated = self._evaluated or not torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    def finish_step(self) -> None:
        self._buffers_differ = True
        if self._evaluated:
            # Only a backward pass frees what a forward pass has gathered: after an evaluation it would be stale.
            for unit in self.module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()
            self._evaluated = False

    def weights(self) -> dict[str, Tensor]:
        # After an evaluation the module may still show gathered parameters: these are the sharded ones, always.
        return {name: parameter.data for name, parameter in self._all.items()}


@torch.no_grad()
def _agree(model: nn.Module, world: World) -> None:
    """Gives all ranks rank 0's parameters and buffers: shards of models that differ would make up a third one."""
    for tensor in chain(model.parameters(), model.buffers()):
        sent = tensor.data.to(world.device)
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(sent)
