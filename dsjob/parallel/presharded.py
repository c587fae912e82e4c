"""Parameters that are sharded as soon as they are created, before an engine takes their model.

`shard_parameters` replaces the parameters of a module by shards: DTensors with rank 0's values. It runs in torch's
registration hook, when a module becomes part of another. A strategy later lays the shards aside, shards the model on
the meta device in its own way, and writes them back. So no rank ever holds more than one whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dsjob.compute.find_blocks import is_external, mark_external
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World
from dsjob.ranks.mpu import copy_marks
from dsjob.torch_private import change_tensors, own_parameters


class ShardStatus(Enum):
    """Whether a sharded parameter is whole on this rank, in DeepSpeed's terms."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_numbers = count()


def announce(parameter: Tensor, status: ShardStatus = ShardStatus.NOT_AVAILABLE) -> None:
    """Sets the attributes by which programs written for DeepSpeed see that a parameter must be gathered.

    Ranks announce the parameters that they share in the same order, so `ds_id` orders them alike on all ranks.
    """
    shape = parameter.shape
    number = parameter.ds_id if hasattr(parameter, "ds_id") else next(_numbers)
    marks = {"ds_id": number, "ds_shape": shape, "ds_numel": shape.numel(), "ds_status": status}
    for name, value in {**marks, "ds_persist": False}.items():  # unlike in DeepSpeed, small ones are sharded too
        setattr(parameter, name, value)


def announce_whole(module: nn.Module) -> None:
    """Gives the parameters of a module on one rank, which stay whole, the attributes of sharded ones: programs for
    stage 3 read them without asking whether they exist."""
    for parameter in module.parameters():
        if not hasattr(parameter, "ds_id"):
            announce(parameter)


def is_unshardable(parameter: Tensor) -> bool:
    """Whether a parameter cannot be sharded: FSDP2 supports neither 0-dim nor empty tensors."""
    return parameter.dim() == 0 or parameter.numel() == 0


def shard_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = None,
    source: Callable[[Tensor], int] = lambda _: 0,
) -> None:
    """Replaces every whole parameter in `module` by this rank's part of the values of one rank, on the mesh's device.

    source: the rank in the mesh that has the values of a parameter; by default rank 0. Casts floating-point ones to
    `dtype`, if given. Parameters that cannot be sharded stay whole. Those on the meta device stay there, because they
    have no values yet (torch.nn.utils.skip_init).
    """
    made: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for owner in module.modules():
        for name, parameter in list(own_parameters(owner).items()):
            if parameter is None or isinstance(parameter, DTensor) or is_unshardable(parameter) or parameter.is_meta:
                continue
            if id(parameter) not in made:
                value = parameter.detach().to(mesh.device_type)
                value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
                # A collective: `source` sends each rank its rows of the value, at most ceil(rows / ranks). The last
                # ranks may get fewer rows, or none.
                rows = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=source(parameter))
                made[id(parameter)] = _replace(parameter, rows)
                announce(made[id(parameter)])
            own_parameters(owner)[name] = made[id(parameter)]


def lay_aside(model: nn.Module) -> dict[str, DTensor]:
    """Replaces sharded parameters by meta tensors with the whole shapes. Returns the shards by name."""
    placed: dict[str, DTensor] = {}
    made: dict[int, nn.Parameter] = {}
    for prefix, owner in model.named_modules():
        for name, parameter in list(own_parameters(owner).items()):
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                placed[f"{prefix}.{name}" if prefix else name] = parameter
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made[id(parameter)] = _replace(parameter, empty)
            own_parameters(owner)[name] = made[id(parameter)]
    return placed


@torch.no_grad()
def write_back(model: nn.Module, placed: dict[str, DTensor], device: torch.device) -> None:
    """Writes the shards in `placed` into a model that was sharded on the meta device. Empties `placed`."""
    if not placed:
        return

    def materialise(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    change_tensors(model, materialise)
    parameters = dict(model.named_parameters())
    for name in list(placed):
        cast(DTensor, parameters[name].data).to_local().copy_(placed.pop(name).to_local())


def require_shards(model: nn.Module, world: World) -> None:
    """Raises UsageError if parameters are sharded over other ranks than those of `world`."""
    ranks = dist.get_process_group_ranks(world.data_group) if dist.is_initialized() else [0]
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and sorted(parameter.device_mesh.mesh.flatten().tolist()) != sorted(ranks):
            raise UsageError(
                f"zero.Init sharded {name} over other ranks than the data-parallel ranks of the engine",
                hint="pass the same mpu to both: zero.Init(mpu=mpu), initialize(mpu=mpu)",
            )


def make_whole(model: nn.Module) -> None:
    """Replaces sharded parameters by whole ones, for a replicated model."""
    for name, shard in lay_aside(model).items():
        path, _, leaf = name.rpartition(".")
        empty = own_parameters(model.get_submodule(path))[leaf]
        whole = _replace(shard, shard.full_tensor().detach())
        for owner in model.modules():
            for key, parameter in list(own_parameters(owner).items()):
                if parameter is empty:
                    own_parameters(owner)[key] = whole


def _replace(parameter: Tensor, value: Tensor) -> nn.Parameter:
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    if is_external(parameter):
        mark_external(made)
    copy_marks(parameter, made)
    return made
