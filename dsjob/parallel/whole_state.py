"""Makes `state_dict()` of a sharded module return whole tensors, for programs that know nothing about sharding.

`module.state_dict()`, and so `save_pretrained` and `torch.save` of it, gather one tensor after another into host
memory. All ranks must call it; if one does not, the others get an error. dsjob's own checkpoints do not use it; they
save shards.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dsjob.optim.shards import whole
from dsjob.ranks.joint import Meetings
from dsjob.ranks.mesh import World
from dsjob.torch_private.fsdp import find_gathered, list_sharded

_ON_ALL = (
    "call it on all ranks, and let one of them write the result; or engine.save_16bit_model(folder) on all ranks, or "
    "at stage 3 engine._zero3_consolidated_16bit_state_dict(); one rank may call it inside "
    "`with deepspeed.zero.GatheredParameters(list(model.parameters()))`, which all ranks enter"
)


def show_whole_state(model: nn.Module, dtype: torch.dtype, world: World) -> None:
    """Makes `state_dict()` of `model` and of its modules return whole tensors, floating-point ones as `dtype`. Also
    tells transformers that the parameters are sharded.

    Raises UsageError, in that call, if another rank does not make it.
    """
    meetings = Meetings(world)

    def gather(module: nn.Module, state: MutableMapping[str, Any], prefix: str, name: str) -> None:
        if prefix and module is not model:  # part of a larger state dict, whose own hook gathers everything at the end
            return
        if any(isinstance(value, DTensor) for value in state.values()):
            meetings.meet(f"{name + '.' if name else ''}state_dict() of a sharded model", _ON_ALL)
        # Tied parameters stay one tensor, so that they can be saved once. Iterate by name, because all ranks must
        # gather in the same order.
        owners = {prefix + name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
        known: dict[int | str, Tensor] = {}
        units = (unit for unit in model.modules() if isinstance(unit, FSDPModule))
        gathered = {id(find_gathered(parameter)) for unit in units for parameter in list_sharded(unit)}
        for name, value in state.items():
            # Parameters that are gathered at the moment are copied too: the next step frees their memory.
            if isinstance(value, DTensor) or owners.get(name) in gathered:
                owner = owners.get(name, name)
                if owner not in known:
                    known[owner] = _copy_whole(value, dtype)
                state[name] = known[owner]

    def named(name: str) -> Callable[..., None]:
        return lambda module, state, prefix, _: gather(module, state, prefix, name)

    for name, module in model.named_modules():
        module.register_state_dict_post_hook(named(name))
    # transformers' `generate` reads this. Ranks that finish early then keep gathering with the others.
    model._is_fsdp_managed_module = True  # type: ignore[assignment]


def _copy_whole(value: Tensor, dtype: torch.dtype) -> Tensor:
    found = whole(value).detach()
    return found.to("cpu", dtype if found.is_floating_point() else found.dtype, copy=not isinstance(value, DTensor))
