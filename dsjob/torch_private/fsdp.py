"""FSDP2's private names. Nothing inside a unit (a module after `fully_shard`) is public.

`list_sharded` returns objects of the class `FSDPParam`. dsjob uses their `sharded_param`, `unsharded_accumulated_grad`,
`offload_to_cpu` and `to_sharded_dtensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dsjob.torch_private import find_part


def list_sharded(unit: FSDPModule) -> list[Any]:
    """The FSDPParam of each parameter that `unit` itself has sharded."""
    return [parameter for group in _list_groups(unit) for parameter in group.fsdp_params]


def look_again_at_dtypes(unit: FSDPModule) -> None:
    """Makes a unit read the dtypes of its trained parameters again. By itself, it reads them only once."""
    for group in _list_groups(unit):
        group._init_mp_dtypes()


def find_gathered(parameter: Any) -> nn.Parameter | None:
    """The whole tensor that the model sees while an FSDPParam is gathered; None before the first time."""
    return getattr(parameter, "_unsharded_param", None)


def is_shown_whole(parameter: Any) -> bool:
    """Whether the model sees the whole tensor of an FSDPParam at the moment, not the shard."""
    return bool(parameter.sharded_state.name == "UNSHARDED")


def name_of(parameter: Any) -> str | None:
    """The name of an FSDPParam in the model that was sharded last, as a whole; None before the first forward pass."""
    return cast("str | None", parameter._param_fqn)


def list_owners(unit: FSDPModule) -> list[nn.Module]:
    """The modules that have the parameters that `unit` itself has sharded, each once."""
    infos = [parameter._module_info for parameter in list_sharded(unit)]
    owners = [owner for info in infos for owner in (info.module, *info.shared_modules)]
    return list(dict.fromkeys(owners))


def keep_gathered_in_state_dict(unit: FSDPModule) -> None:
    """Keeps `state_dict()` from freeing the gathered parameters of a unit, which has begun its calls.

    FSDP2 frees them on the rank that calls it, even if the others do not. There is no public option for that.
    """
    for group in _list_groups(unit):
        for handle in group._module_to_pre_save_state_dict_hook_handle.values():
            handle.remove()


def is_gathered(unit: FSDPModule) -> bool:
    """Whether the parameters of a unit are whole on this rank. `unshard` would find out, but not in a microsecond."""
    return all(group.is_unsharded for group in _list_groups(unit))


def begin_calls(unit: FSDPModule) -> None:
    """Makes a unit the one whose calls begin a forward pass: else the first to be called is, whatever is inside."""
    state: Any = unit._get_fsdp_state()
    state._lazy_init()


def shard_memory(parameter: Any) -> Tensor:
    """This rank's shard of an FSDPParam: 1-D, padded to the size that all ranks gather."""
    return cast(Tensor, parameter._sharded_param_data)


def show_shard_in(parameter: Any, memory: Tensor, *, whole: bool = False) -> None:
    """Makes an FSDPParam gather its shard from `memory`, which holds the same values as `shard_memory`. whole: also
    moves the parameter that the optimizer and the model have there, which stays the same object."""
    parameter._sharded_param_data = memory
    if whole:
        own = find_part(parameter.sharded_param)
        own.data = memory[: own.numel()].view(own.shape)


def pin_gradients(parameter: Any) -> None:
    """Makes gradients of an FSDPParam go to page-locked memory without a wait, as CPUOffloadPolicy(pin_memory=True)
    does, which would also move the shard to such memory."""
    reset = parameter.reset_sharded_param

    def reset_without_pinning() -> None:
        parameter.pin_memory = False
        reset()
        parameter.pin_memory = True

    parameter.reset_sharded_param, parameter.pin_memory = reset_without_pinning, True


def read_before_gathers(
    unit: FSDPModule, needed: Callable[[bool], None], done: Callable[[Any], None], alone: bool
) -> None:
    """Calls `needed(in_backward)` before a unit copies its shards to gather them, and `done(event)` after.

    FSDP2 has no hooks there. event: torch.Event after the copies to a GPU. alone: on one rank, which copies at the end
    of a gather, not at its beginning; then `event` is None, because the copies are on the current stream.
    """
    name = "wait_for_unshard" if alone else "unshard"
    for group in _list_groups(unit):
        original = getattr(group, name)

        def gather(*args: Any, group: Any = group, original: Any = original, **kwargs: Any) -> None:
            copies = group.is_sharded and (group._all_gather_result is not None) == alone
            if copies:
                needed(group._training_state.name == "PRE_BACKWARD")
            original(*args, **kwargs)
            if copies:
                done(None if alone else group._all_gather_result.all_gather_event)

        setattr(group, name, gather)


def _list_groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    # A list of groups since torch 2.13; before, one group or None.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
