"""FSDP2's private names. Nothing inside a unit (a module after `fully_shard`) is public.

`list_sharded` returns objects of the class `FSDPParam`. dsjob uses their `sharded_param`, `offload_to_cpu` and
`to_sharded_dtensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
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


def find_own_gradient(parameter: Any) -> Tensor | None:
    """This rank's whole unreduced gradient of an FSDPParam; None if there is none.

    Before torch 2.15, passes without reduction leave it beside the parameter, in the dtype of reductions.
    """
    if parameter.unsharded_accumulated_grad is not None:
        return cast(Tensor, parameter.unsharded_accumulated_grad)
    gathered = find_gathered(parameter)
    return gathered.grad if gathered is not None else None


def drop_own_gradient(parameter: Any) -> None:
    """Drops what `find_own_gradient` returns."""
    gathered = find_gathered(parameter)
    if gathered is not None:
        gathered.grad = None
    if parameter.unsharded_accumulated_grad is not None:
        parameter.unsharded_accumulated_grad = None


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


class PassObserver(Protocol):
    """Is called during the passes of units, which are numbered."""

    def on_gather(self, number: int) -> None:
        """Called before a unit's parameters are gathered."""

    def on_forward(self, number: int, *, differentiable: bool) -> None:
        """Called when a forward pass with gradients enters a unit. differentiable: its inputs need gradients, so that
        `on_backward` follows."""

    def on_backward(self, number: int) -> None:
        """Called instead of FSDP2's reduction, when the gradients of one use of a unit are complete."""

    def on_backward_end(self) -> None:
        """Called at the end of a backward pass, before FSDP2 ends it for all units."""


class UnitPasses:
    """The passes of a unit that has parameters of its own."""

    def __init__(self, group: Any, observer: PassObserver, number: int) -> None:
        self._group = group
        self.module: nn.Module = group.modules[0]
        self.parameters: list[Any] = group.fsdp_params
        self._unshard, self._post_backward = group.unshard, group.post_backward
        register = group._register_post_backward_hook

        def unshard(*args: Any, **kwargs: Any) -> None:
            if not self.gathered:
                observer.on_gather(number)
            self._unshard(*args, **kwargs)

        def register_backward(args: Any, kwargs: Any) -> Any:
            made = register(args, kwargs)
            # Not in a backward pass, which calls recomputed blocks again.
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                # FSDP2 has replaced the arguments if they need gradients.
                observer.on_forward(number, differentiable=made[0] is not args or made[1] is not kwargs)
            return made

        def post_backward(*_: Any) -> None:
            observer.on_backward(number)

        self._replaced = {
            "unshard": unshard,
            "_register_post_backward_hook": register_backward,
            "post_backward": post_backward,
        }
        self.observe()

    def observe(self) -> None:
        """Makes FSDP2 call the observer."""
        vars(self._group).update(self._replaced)

    def stop_observing(self) -> None:
        """Makes FSDP2 call its own methods again."""
        for name in self._replaced:
            vars(self._group).pop(name, None)

    @property
    def gathered(self) -> bool:
        """Whether the parameters are whole on this rank, or are being gathered."""
        return self._group.is_unsharded or self._group._all_gather_result is not None

    @property
    def reduces(self) -> bool:
        """Whether backward passes reduce gradients at the moment."""
        return bool(self._group.reduce_grads)

    @property
    def reshards(self) -> bool:
        """Whether backward passes free gathered parameters at the moment."""
        return bool(self._group.reshard_after_backward)

    def gather(self) -> None:
        """Gathers the parameters. A collective."""
        self._unshard()
        self._group.wait_for_unshard()

    def take_part(self, *, zeros: bool) -> list[Any]:
        """Prepares the gradients for reduction. Returns the FSDPParams that have one on this rank.

        zeros: gives the other trained parameters gradients of zero.
        """
        used, added, accumulated = [], 0, 0
        for parameter in self.parameters:
            if find_own_gradient(parameter) is not None:
                used.append(parameter)
                accumulated += parameter.unsharded_accumulated_grad is not None
            elif zeros and parameter.sharded_param.requires_grad and (gathered := find_gathered(parameter)) is not None:
                gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype)
                added += 1
        if 0 < accumulated < len(used) + added:
            # Earlier passes have left some in the dtype of reductions. FSDP2 reduces gradients of one dtype together.
            self.end_without_reducing()
        return used

    def end(self) -> None:
        """Ends a backward pass of the unit as FSDP2 does: reduces the gradients that this rank has, unless reduction is
        off, and frees the parameters. A collective if it reduces."""
        if any(find_gathered(parameter) is not None for parameter in self.parameters):
            self._post_backward()

    def end_without_reducing(self) -> None:
        """Does what `end` does while reduction is off: the gradients stay on this rank."""
        before, self._group.reduce_grads = self._group.reduce_grads, False
        self.end()
        self._group.reduce_grads = before


def observe_passes(units: Sequence[FSDPModule], observer: PassObserver) -> list[UnitPasses]:
    """Makes the passes of units call `observer`. The first unit is the root.

    Returns the passes of those that have parameters of their own. Their numbers are their places in this list.
    """
    groups = [group for unit in units for group in _list_groups(unit)]
    passes = [UnitPasses(group, observer, number) for number, group in enumerate(groups)]
    for unit in units:
        state: Any = unit._get_fsdp_state()

        def end(original: Callable[[], None] = state._root_post_backward_final_callback) -> None:
            observer.on_backward_end()
            # FSDP2 ends the passes of those units for which it has not called `post_backward`.
            for each in passes:
                each.stop_observing()
            try:
                original()
            finally:
                for each in passes:
                    each.observe()

        state._root_post_backward_final_callback = end
    return passes


def _list_groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    # A list of groups since torch 2.13; before, one group or None.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
