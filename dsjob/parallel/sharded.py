"""ZeRO stages 1 to 3 on FSDP2: fp32 masters sharded over the ranks, compute copies gathered block by block.

stage  gradients                                        parameters
1      kept whole while accumulating, reduce-scattered   gathered once a step
       at the boundary
2      reduce-scattered every micro step                 gathered once a step
3      reduce-scattered every micro step                 gathered for each use, block by block
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

from dsjob.autocast import DEFAULT_SAFE_MODULES, mark, marked_dtype
from dsjob.errors import ContractError
from dsjob.mesh import World
from dsjob.parallel.base import Strategy, align, mark_safe, widen
from dsjob.parallel.presharded import announce, lay_aside, write_back
from dsjob.parallel.wrap import find_blocks
from dsjob.precision import Precision


class Sharded(Strategy):
    """The repeated blocks of a model, and what remains, each sharded as one unit."""

    def __init__(self, model: nn.Module, *, stage: int, world: World, precision: Precision) -> None:
        self._stage = stage
        self._flags: tuple[bool, bool] | None = None
        self._reduce_dtype = precision.reduce
        _refuse_scalars(model)
        placed = lay_aside(model)
        align(model, world)
        widen(model)
        mesh = self._mesh = world.make_mesh()
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
        for safe in mark_safe(model, precision):
            _shard_safe(safe, mesh, stage, precision.autocast)
        for block in find_blocks(model):
            if isinstance(block, FSDPModule):
                continue
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
        # What is outside the blocks is used at both ends of the model: freeing it in between would gather it twice.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        write_back(model, placed, world.device)
        self.module = model
        self.masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._all = dict(model.named_parameters())
        for parameter in self._all.values():
            announce(parameter)
        self._has_buffers = any(True for _ in model.buffers())
        self._buffers_differ = True
        self._evaluated = False

    def start_micro_step(self, boundary: bool, sync: bool = True) -> None:
        if self._buffers_differ and self._has_buffers:
            # As DDP does: each step begins with rank 0's buffers, so that one checkpoint speaks for all ranks. A model
            # may have put new tensors in the place of old ones.
            _broadcast_coalesced(_get_default_group(), list(self.module.buffers()), 25 << 20, 0)
            self._buffers_differ = False
        if (boundary, sync) == self._flags:
            return
        self._flags = (boundary, sync)
        root = cast(FSDPModule, self.module)
        root.set_requires_gradient_sync(sync and (boundary or self._stage > 1))
        if self._stage < 3:
            root.set_reshard_after_backward(boundary)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        waiting = [p for unit in self._units() for p in _list_fsdp_parameters(unit) if _own_gradient(p) is not None]
        for parameter in waiting:  # in the same order on every rank
            gradient = cast(Tensor, _own_gradient(parameter))
            sent = gradient.to(marked_dtype(parameter.sharded_param) or self._reduce_dtype) / self._mesh.size()
            whole = DTensor.from_local(sent, self._mesh, [Partial()], run_check=False)
            placed = whole.redistribute(placements=parameter.sharded_param.placements)
            share = placed.to(parameter.sharded_param.dtype)
            before = parameter.sharded_param.grad
            parameter.sharded_param.grad = share if before is None else before + share
            parameter.unsharded_accumulated_grad = None
            parameter._unsharded_param.grad = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluated = self._evaluated or not torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    def finish_step(self) -> None:
        super().finish_step()
        self._buffers_differ = True
        if self._evaluated or self._flags is None or not self._flags[0]:
            # Only a backward pass at the boundary frees what a forward pass has gathered: after an evaluation, or where
            # the program has moved the boundary since, it would be stale.
            self.free_gathered()
            self._evaluated = False

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for unit in self._units():
            # Micro steps before the boundary may have left parameters gathered, and sums in a wider dtype beside them.
            for parameter in _list_fsdp_parameters(unit):
                parameter.unsharded_accumulated_grad = None
            unit.reshard()
        super().drop_gradients()

    def shown(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().shown()
        yield from self._all.items()

    def free_gathered(self) -> None:
        for unit in self._units():
            unit.reshard()

    def _units(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def weights(self) -> dict[str, Tensor]:
        # After an evaluation the module may still show gathered parameters: these are the sharded ones, always.
        return {name: parameter.data for name, parameter in self._all.items()}


def _shard_safe(module: nn.Module, mesh: DeviceMesh, stage: int, dtype: torch.dtype | None) -> None:
    """Shards a module whose gradients travel in `dtype`; at stage 3, as with DeepSpeed, its parameters do so too.

    It is a unit of its own, since a unit has one dtype, and one of several modules waits for all of them to be used.
    """
    # Only what autocast would lower in any case: other operators may not take parameters and inputs of two dtypes.
    gathers_low = stage == 3 and type(module) in DEFAULT_SAFE_MODULES
    low = MixedPrecisionPolicy(
        param_dtype=dtype if gathers_low else None, reduce_dtype=dtype, cast_forward_inputs=False
    )
    fully_shard(module, mesh=mesh, mp_policy=low, reshard_after_forward=stage == 3)
    for parameter in module.parameters():
        mark(parameter, cast(torch.dtype, dtype))


def _list_fsdp_parameters(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    # One group before torch 2.13, a list of them since.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def _own_gradient(parameter: Any) -> Tensor | None:
    """What backward passes that were told not to reduce have added up: the whole gradient of this rank."""
    if parameter.unsharded_accumulated_grad is not None:
        return cast(Tensor, parameter.unsharded_accumulated_grad)
    unsharded = getattr(parameter, "_unsharded_param", None)
    return unsharded.grad if unsharded is not None else None


def _refuse_scalars(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ContractError(
            f"parameter {scalars[0]} has no dimension to shard it along",
            hint="make it a tensor of shape [1], or train with zero_optimization.stage=0",
        )
