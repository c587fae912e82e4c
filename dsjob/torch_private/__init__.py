"""Every private name of torch that dsjob uses, and why no public one does. `fsdp` has those of FSDP2.

Checked on torch 2.11.0 and 2.13.0. A new version of torch may rename any of them: `tests/test_torch_private.py` checks
each on the torch that is installed, and fails where another module of dsjob uses a private name. `torch._foreach_*` is
used everywhere: torch documents it ("Foreach Operations").
`dsjob/checkpoint/format/zero_to_fp32.py` stands alone and uses no torch.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed import Store
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _get_split_source,
    _new_process_group_helper,
    _world,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# torch.utils._pytree: walks nested lists, tuples and dicts. torch's documentation names it, but it has no public name.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

if TYPE_CHECKING:  # they take long to import, and not all that runs on ranks needs them
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

# is_functorch_wrapped_tensor: whether torch.func differentiates a tensor. torch.func itself cannot tell.
# FakeTensor, FakeTensorMode, TorchDispatchMode: run a model on tensors without memory, and see each operator. torch's
# documentation describes them under these private names only.

# The base class of batch and instance norms, which has the running statistics. The public classes (nn.BatchNorm1d, ...)
# would miss classes that programs derive from it.
NormBase = _NormBase


# --- torch.distributed


def list_process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this process is in. torch.distributed only gives access to the default one."""
    return list(_world.pg_map)


def count_collectives(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has entered in `group`. There is no public counter.

    Raises RuntimeError for a backend that does not count, and for a group that is being destroyed.
    """
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def get_store() -> Store:
    """The store of the rendezvous. `init_process_group` takes one, but no public function returns it."""
    return _get_default_store()


_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()  # by the default group


def make_group(lines: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """A group of those of `lines`, sorted and disjoint lists of ranks, that this rank is in; None if it is in none. All
    ranks call it with the same lines, in the same order of calls.

    `dist.new_group` would be called for each line on all ranks: at 1,024 ranks, a thousand times. This creates at most
    one group: by one split of NCCL's communicator, which all ranks take part in, or by the ranks of the group alone.
    For why not with use_local_synchronization, see `make_group_of_hosts`. A program's own group of both NCCL and gloo
    has to be split line by line.
    """
    world: Any = dist.group.WORLD
    if world.bound_device_id is not None and _get_split_source(world) is not None:
        if ":" in str(_world.pg_map[world][0]):
            made = [dist.new_group(list(line), timeout=timeout) for line in lines]
            return next((group for line, group in zip(lines, made, strict=True) if dist.get_rank() in line), None)
        return dist.split_group(split_ranks=[list(line) for line in lines], timeout=timeout)
    own = next((tuple(line) for line in lines if dist.get_rank() in line), None)
    if own is None:
        return None
    # The store keeps the addresses of earlier groups under their names, even of those that have been destroyed.
    counts = _made.setdefault(world, Counter())
    counts[own] += 1
    number = hashlib.sha1(repr((own, counts[own])).encode(), usedforsecurity=False).hexdigest()
    return _make_named(own, own.index(dist.get_rank()), _world.pg_map[world][0], f"dsjob/{number}", timeout)


def _make_named(ranks: Sequence[int], rank: int, backend: Any, name: Any, timeout: timedelta) -> dist.ProcessGroup:
    made, _ = _new_process_group_helper(len(ranks), rank, list(ranks), backend, get_store(), name, timeout=timeout)
    _world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, made)


def make_group_of_hosts(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group with the ranks of `group`, and a name derived from that of `group`. Only these ranks call it.

    `dist.new_group` with use_local_synchronization would derive the name from the number of groups that a rank is in.
    That number may differ, and ranks that use different names wait for each other for ever.
    """
    ranks = dist.get_process_group_ranks(group)
    return _make_named(ranks, group.rank(), "gloo", f"{group.group_name}/hosts", timeout)


def make_group_of_one() -> dist.ProcessGroup:
    """A group of only this rank, without connections or threads: torch's "fake" backend, which must be registered.

    Its collectives keep or copy their input, which is correct for one rank. But on torch 2.11, `reduce_scatter` and
    `all_to_all` do not write their output, so nothing should communicate in it. A public backend would open a socket.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers it)

    made: dist.ProcessGroup = dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)
    return made


@contextmanager
def imagining_ranks(count: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `count` ranks that do not exist, which all do what it does: collectives move
    nothing. Must not be called by a process that is in a process group."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def find_group_name(arguments: Any) -> str | None:
    """The name of the process group in the arguments of a collective, as a TorchDispatchMode sees them; None for other
    operators."""
    leaves = tree_leaves(arguments)
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return str(dist.ProcessGroup.unbox(leaf).group_name)
    return next((leaf for leaf in reversed(leaves) if isinstance(leaf, str)), None)


def keep_outputs(ddp: DistributedDataParallel) -> None:
    """Keeps DDP from copying outputs after the autograd node that it adds for parameters without gradient.

    There is no public option for that.
    """
    ddp._set_ddp_sink_clone(False)


def with_part(like: DTensor, part: Tensor) -> DTensor:
    """`part` as this rank's part of a tensor that is spread like `like`, with the dtype of `part`.

    `DTensor.from_local` would copy a part on the host to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    meta = like._spec.tensor_meta
    assert meta is not None
    spec = replace(like._spec, tensor_meta=meta._replace(dtype=part.dtype))
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def find_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor: the object inside it, whose memory can be replaced. `to_local` returns another
    object with the same memory. A plain tensor is returned unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# --- torch.nn


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The module's own parameters by name (None for empty ones): the dict itself, in which they can be replaced.

    `setattr` and `register_parameter` would call the hooks that zero.Init registers.
    """
    return module._parameters


def copy_with_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A shallow copy that shares the module's buffers, and has `change(parameter)` in place of its own parameters.

    `torch.func.functional_call` would call a `forward` that was set on the module, instead of that of its class.
    """
    made = copy.copy(module)
    made._parameters = {n: p if p is None else change(p) for n, p in module._parameters.items()}  # type: ignore[misc]
    return made


def call_with_meta(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What `module` returns for these arguments, computed without values: all tensors are on the meta device."""

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    floats = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]

    def move(tensor: Tensor) -> Tensor:
        # Inputs in the dtype of the parameters: autocast, which would see to that, has no meta device.
        casts = tensor.is_floating_point() and floats
        return tensor.detach().to("meta", floats[0] if casts else tensor.dtype)

    bare = {name: tensor.detach().to("meta") for name, tensor in state.items()}
    with torch.no_grad():
        args, kwargs = tree_map_only(Tensor, move, (tuple(args), dict(kwargs)))
        return torch.func.functional_call(module, bare, args, kwargs)


def list_saved_buffers(module: nn.Module) -> list[str]:
    """Names of the module's own buffers in its state dict. `state_dict()` itself would gather sharded parameters."""
    return [name for name in module._buffers if name not in module._non_persistent_buffers_set]


def change_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter, its gradient and each buffer by `change(tensor)`.

    `Module.to` does the same, but only takes a device or dtype.
    """
    model._apply(change)  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def count_changes(tensor: Tensor) -> int:
    """How many operations have changed `tensor` in place. No public name has this number."""
    return int(tensor._version)


@contextmanager
def replacing_method(owner: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replaces or adds a method of a class within the block. The names are public, but replacing them is not
    documented.

    Models initialise their weights with such methods of `nn.Module`, and no hook says which module is next.
    """
    original = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def list_children(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module under all of their names; `named_children` lists each child once."""
    return {name: child for name, child in module._modules.items() if child is not None}


def replace_child(owner: nn.Module, key: str, child: object) -> None:
    """Puts anything that can be called in the place of a module's child."""
    owner._modules[key] = child  # type: ignore[assignment]


def list_forward_hooks(module: nn.Module) -> list[Any]:
    """The functions that a call of this module runs before and after its `forward`."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


# --- torch.optim


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether something is called before or after `step`. Hooks can be registered, but not listed."""
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
    )


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether `step` reads `found_inf` on the device, as it does for GradScaler."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def init_group(optimizer: torch.optim.Adam, group: dict[str, Any], *lists: Any) -> Any:
    """Adam's own `_init_group`, which collects the tensors that `step` updates; for subclasses that override it.

    The only public alternative is to override the whole `step`.
    """
    return torch.optim.Adam._init_group(optimizer, group, *lists)  # type: ignore[no-untyped-call]


@contextmanager
def collecting(optimizer: Optimizer, change: Callable[[Any], Any]) -> Iterator[None]:
    """In this context, a step of `optimizer` computes with `change(tensor)` in place of each tensor that it collects.

    For optimizers of torch whose `step` only changes tensors in place, and afterwards looks none of them up: not SGD.
    The only public alternative is torch's functions such as `torch.optim.adam.adam`, one for each optimizer.
    """
    inner: Any = optimizer._init_group  # type: ignore[attr-defined]

    def collect(group: dict[str, Any], *lists: Any) -> Any:
        result = inner(group, *lists)
        for found in lists:
            found[:] = map(change, found)
        return result

    optimizer._init_group = collect  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer._init_group  # type: ignore[attr-defined]


# --- tensors


def assert_on_device(holds: Tensor) -> None:
    """Fails if `holds`, a bool scalar, is false, without waiting for the device. Public functions would wait."""
    torch._assert_async(holds)


def address_of(tensor: Tensor) -> int:
    """A number that identifies a storage, even one without memory, for which `data_ptr()` is always 0."""
    return int(tensor.untyped_storage()._cdata)


def find_base(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a view of; `tensor` itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def position_in_file(tensor: Tensor) -> int | None:
    """The offset in the file at which `torch.load(map_location="meta")` found a tensor's storage."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


# --- torch.compile


def raise_recompile_limit(limit: int) -> None:
    """Lets torch compile a function at least `limit` times. `torch.compile` takes a limit only since torch 2.13."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, limit)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)


COMPILER_LOG = logging.getLogger("torch._dynamo.convert_frame")
LIMIT_REACHED = "torch._dynamo hit config."  # begins that logger's message when a function is not compiled any more


# --- torch.utils.data


@contextmanager
def hiding_worker() -> Iterator[None]:
    """Makes `get_worker_info` return None, as in a process that is no worker of a DataLoader. Nothing public does."""
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
