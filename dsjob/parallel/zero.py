"""DeepSpeed's `zero` namespace: gathering parameters temporarily, external parameters and leaf modules.

Sharding models while they are built is in `zero_init`, sharding them for training is up to the strategies, and reading
single values is in `parameters`.

`GatheredParameters` changes the class of the parameter objects themselves while they are gathered, so that all
references to them see the whole values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsjob.compute.find_blocks import mark_external
from dsjob.errors import UsageError
from dsjob.optim.shards import local, own_part
from dsjob.optim.shards import whole as gather
from dsjob.parallel.parameters import find_owned, meet_to_gather
from dsjob.parallel.presharded import ShardStatus, announce
from dsjob.terminal import warn
from dsjob.torch_private import count_changes, tree_map


class _Gathered(DTensor):
    """A sharded parameter while it is gathered. All operations use `_whole` instead."""

    __slots__ = ()
    _whole: nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def whole(value: Any) -> Any:
            return value._whole if isinstance(value, _Gathered) else value

        return func(*tree_map(whole, args), **tree_map(whole, kwargs or {}))


class GatheredParameters:
    """A context in which `params` are whole on every rank: the same parameter objects, wherever they are referenced.

    modifier_rank: the rank whose values at the end are kept, on all ranks and in the masters (with an mpu, a
    data-parallel rank). Without it, changes are lost, and a UserWarning says so (but not of changes of `.data`). Every
    rank must enter and leave the context. Contexts may be nested. Among `params`, None and copies of shards, such as
    those of a state dict, are skipped. `fwd_module` has no effect, since forward passes gather on their own.
    """

    def __init__(
        self,
        params: Tensor | nn.Module | Iterable[Tensor | None] | Mapping[str, Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, Mapping):
            params = params.values()
        listed = [params] if params is None or isinstance(params, Tensor) else list(params)
        # Copies of shards, such as those of a state dict, have no ds_id. A set has another order on each rank.
        own = {id(p): p for p in listed if p is not None and (hasattr(p, "ds_id") or not isinstance(p, DTensor))}
        self._params = sorted(own.values(), key=lambda p: getattr(p, "ds_id", -1)) if enabled else []
        self._modifier_rank = modifier_rank
        self.group: dist.ProcessGroup | None = None  # ranks with the same unsharded parameters; None: all
        self._gathered: list[Tensor] = []
        self._versions: list[int] = []  # of the whole values, which count their changes in place
        self._announced: list[Tensor] = []

    def __enter__(self) -> GatheredParameters:
        meet_to_gather(p for p in self._params if isinstance(p, DTensor) and not isinstance(p, _Gathered))
        for parameter in self._params:
            # On a single rank, whole parameters may have the attributes of shards.
            status = getattr(parameter, "ds_status", None)
            if not isinstance(parameter, DTensor) and status == ShardStatus.NOT_AVAILABLE:
                announce(parameter, ShardStatus.AVAILABLE)
                self._announced.append(parameter)
            # An outer context may have gathered it already; then only that one puts it back.
            if isinstance(parameter, DTensor) and not isinstance(parameter, _Gathered):
                # A collective: all ranks must list the same parameters in the same order. `whole` has the whole shape.
                whole = nn.Parameter(gather(parameter.detach()), requires_grad=parameter.requires_grad)
                parameter._whole = whole  # type: ignore[attr-defined]
                # Changing the class keeps the object, so every reference to the parameter sees the whole value.
                parameter.__class__ = _Gathered
                announce(parameter, ShardStatus.AVAILABLE)
                self._gathered.append(parameter)
                self._versions.append(count_changes(whole))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._announced:
            announce(self._announced.pop())
        if self._modifier_rank is None and kind is None:
            self._warn_of_lost_changes()
        # After an error, do not broadcast: other ranks may not get here, and this rank would wait for them.
        keeps = self._modifier_rank is not None and kind is None
        values = [self._agree(parameter) for parameter in self._params] if keeps else []
        wholes = {id(parameter): parameter for parameter in self._gathered}
        for parameter in self._gathered:
            trained = _whole_of(parameter).requires_grad  # the program may have frozen it
            parameter.__class__ = DTensor
            del parameter._whole  # type: ignore[attr-defined]
            parameter.requires_grad_(trained)
            announce(parameter)
        self._gathered, self._versions = [], []
        # First write all shards. Then update what each engine derives from them, once per engine.
        changed = set()
        for parameter, value in zip(self._params, values, strict=False):
            _write(parameter, value, inside=isinstance(parameter, _Gathered) and id(parameter) not in wholes)
            owned = find_owned(parameter)
            if owned is not None:
                changed.add(owned.owner)
        for owner in changed:
            owner.strategy.weights_changed()

    def _warn_of_lost_changes(self) -> None:
        pairs = zip(self._gathered, self._versions, strict=True)
        lost = [parameter for parameter, version in pairs if count_changes(_whole_of(parameter)) != version]
        if lost:
            shapes = ", ".join(str(list(_whole_of(parameter).shape)) for parameter in lost[:3])
            warn(
                f"GatheredParameters without modifier_rank drops what was changed inside: {len(lost)} of"
                f" {len(self._gathered)} parameters (shapes {shapes}{', ...' if len(lost) > 3 else ''}); pass"
                " modifier_rank=0 to keep the changes of rank 0",
                stacklevel=3,
            )

    @torch.no_grad()
    def _agree(self, parameter: Tensor) -> Tensor:
        """The modifying rank's value of `parameter`."""
        value, group = _whole_of(parameter).data, _find_group(parameter) or self.group or _find_everyone()
        if group is not None and dist.get_world_size(group) > 1:
            # The broadcast overwrites it on all other ranks.
            value = value.contiguous()
            dist.broadcast(value, group=group, group_src=self._modifier_rank)
        return value


def _find_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that have the same parameter, or a part of it. None if neither an engine nor its shards know them."""
    owned = find_owned(parameter)
    if owned is not None and owned.owner.strategy.world.data_group is not None:
        return owned.owner.strategy.world.data_group
    if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:
        return parameter.device_mesh.get_group()
    return None


def _find_everyone() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def is_gathered(parameter: Tensor) -> bool:
    """Whether a sharded parameter is whole at the moment."""
    return isinstance(parameter, _Gathered)


def _whole_of(parameter: Tensor) -> Tensor:
    return parameter._whole if isinstance(parameter, _Gathered) else parameter


@torch.no_grad()
def _write(parameter: Tensor, value: Tensor, *, inside: bool) -> None:
    """Writes a whole value to a parameter, its shards and its master. inside: it stays gathered, in an outer
    context."""
    if inside:
        _whole_of(parameter).data.copy_(value)
        # `local` needs the DTensor; an outer context still shows the whole value afterwards.
        parameter.__class__, whole = DTensor, _whole_of(parameter)
        local(parameter).copy_(own_part(value.to(parameter.dtype), parameter))
        parameter.__class__ = _Gathered
        parameter._whole = whole  # type: ignore[attr-defined]
    else:
        local(parameter).copy_(own_part(value.to(parameter.dtype), parameter))
    # Without offloading, a shard is the master itself. Otherwise, write the fp32 master too; from `value`,
    # which may be more precise than the parameter.
    owned = find_owned(parameter)
    if owned is not None and local(owned.weight).data_ptr() != local(parameter).data_ptr():
        master = owned.weight
        local(master).copy_(own_part(value.to(master.dtype), master))


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declares that `module` uses a parameter of another module, which is then gathered for the whole forward pass.

    Call it in the model's constructor. Raises UsageError if the model has an engine already.
    """
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"an external parameter must be an nn.Parameter, not {type(parameter).__name__}")
    if find_owned(parameter) is not None:
        raise UsageError(
            "register_external_parameter was called too late: the model is already sharded",
            hint="call it in the constructor of the module that uses the parameter",
        )
    mark_external(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Reverses `register_external_parameter`."""
    parameter.__dict__.pop("_dsjob_external", None)
