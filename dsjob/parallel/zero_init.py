"""`zero.Init`: shards a model while it is built, so that it is never whole on any rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from dsjob.errors import UsageError
from dsjob.optim.shards import local
from dsjob.parallel.presharded import announce_whole, shard_parameters
from dsjob.parallel.zero import GatheredParameters, is_gathered
from dsjob.ranks.mesh import World, join_world
from dsjob.ranks.mpu import divide
from dsjob.ranks.rendezvous import init_distributed
from dsjob.torch_private import replacing_method

# What fills a whole tensor, whatever it was: in torch, in nn.init, and in transformers, which replaces the functions of
# nn.init by its own of the same names.
_FILLING = {name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")}
_FILLING |= {"bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"}


class Init:
    """A context in which each module's parameters are sharded over all ranks as soon as it becomes part of another.

    So a model is never whole on any rank: only a single module's own parameters are, right after their creation, and
    those of the outermost module until the end. All ranks build the same model; rank 0's values are used.
    `Module.apply` and transformers, which initialise a model module by module, see whole parameters. What `nn.init` and
    methods such as `normal_` write into shards elsewhere are the values that the whole parameters would get.

    module: an existing module to shard at once. dtype: cast parameters to it; by default they keep their dtype, since
    they become the masters. mpu, data_parallel_group, sequence_data_parallel_group: the ranks to shard over, instead of
    all. enabled: False turns everything off. The other arguments are DeepSpeed's and have no effect, but quantization
    is refused. On one rank, parameters stay whole, but have the attributes of sharded ones. A process without a process
    group joins one.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: dist.ProcessGroup | None = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        if remote_device not in (None, "none", "cpu"):
            raise UsageError(f"zero.Init: invalid remote_device {remote_device!r}", hint='use "cpu" or None')
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise UsageError("zero.Init: quantized weights would change the results", hint="leave the argument out")
        self._dtype, self._enabled = dtype, enabled
        self._mesh: DeviceMesh | None = None
        self._group: dist.ProcessGroup | None = None
        self._stack = contextlib.ExitStack()
        if enabled:
            init_distributed()
            world = _find_world(mpu, data_parallel_group or sequence_data_parallel_group)
            # Not `data_mesh` itself: its dim has a name. peft takes weights on named meshes for parts of tensor
            # parallelism, which compute with their parts alone, and would make adapters of the parts' sizes.
            if world.data_size > 1:
                self._mesh = DeviceMesh.from_group(world.data_mesh.get_group(), world.device.type)
            self._group = world.data_group
        if module is not None and enabled:
            self._place(module)

    def _place(self, module: nn.Module) -> None:
        if self._mesh is not None:
            shard_parameters(module, self._mesh, self._dtype)
            return
        announce_whole(module)

    def __enter__(self) -> Init:
        if not self._enabled:
            return self

        # When a parent takes a module, its `__init__` has returned, so its own parameters are complete.
        def place(parent: nn.Module, name: str, child: nn.Module | None) -> None:
            if child is not None:
                self._place(child)

        # Weak references: modules that a constructor creates and drops must not be kept alive.
        built: WeakSet[nn.Module] = WeakSet()

        def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            built.add(module)

        def place_rest() -> None:
            for module in list(built):  # modules that are not part of another
                self._place(module)

        for handle in (
            register_module_module_registration_hook(place),
            register_module_parameter_registration_hook(note),
        ):
            self._stack.callback(handle.remove)
        self._stack.callback(place_rest)
        if self._mesh is not None:
            self._stack.enter_context(_visit_whole(self._group))
            self._stack.enter_context(_DrawsWhole())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _find_world(mpu: Any, group: dist.ProcessGroup | None) -> World:
    """This process among those to shard over."""
    world = join_world()
    if group is None or group is dist.group.WORLD:
        return divide(world, mpu)
    return replace(
        world,
        data_rank=dist.get_rank(group),
        data_size=dist.get_world_size(group),
        data_group=group,
        order=tuple(dist.get_process_group_ranks(group)),
    )


@contextmanager
def _visit_whole(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes `Module.apply`, and transformers' walk over a model, gather the parameters of each module that they visit.
    Rank 0's changes are kept.

    group: the ranks that have the same parameters; None for all.
    """

    def visit(module: nn.Module, parameters: list[nn.Parameter], visit_whole: Callable[[], object]) -> nn.Module:
        gathered = GatheredParameters(parameters, modifier_rank=0)
        gathered.group = group
        with gathered:
            visit_whole()
        return module

    def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        for child in self.children():
            child.apply(fn)
        # Children first, as in torch. Gather only this module's own parameters, never the whole model.
        return visit(self, list(self.parameters(recurse=False)), lambda: fn(self))

    def smart_apply(self: nn.Module, fn: Callable[..., None], *more: Any) -> nn.Module:
        for child in self.children():
            smart_apply(child, getattr(child, fn.__name__, fn), *more)  # a model within a model has its own
        # A module may initialise its children too.
        near = [parameter for each in (self, *self.children()) for parameter in each.parameters(recurse=False)]
        return visit(self, near, lambda: fn(self, *more))

    with replacing_method(nn.Module, "apply", apply), replacing_method(nn.Module, "smart_apply", smart_apply):
        yield


class _DrawsWhole(TorchFunctionMode):
    """Gives sharded parameters the initial values that the whole ones would get. Constructors also fill parameters of
    modules that they have built, and torch draws the same values for the shards of all ranks on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        filled: Any = args[0] if args else named.pop("tensor", None)
        fills = getattr(func, "__name__", "") in _FILLING
        if not fills or not isinstance(filled, DTensor) or is_gathered(filled) or filled.is_meta:
            return func(*args, **(kwargs or {}))
        drawn = torch.empty(filled.shape, dtype=filled.dtype, device=filled.device)
        func(drawn, *args[1:], **named)
        with torch.no_grad():  # a collective: rank 0's values
            local(filled).copy_(local(distribute_tensor(drawn, filled.device_mesh, filled.placements)))
        return filled
