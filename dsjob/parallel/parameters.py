"""Reads and writes one parameter of an engine: its fp32 value, gradient and optimizer state.

Either whole (`full`), which is a collective of all ranks if it is sharded, or this rank's part (`local`). The function
names are DeepSpeed's. A parameter is identified by the tensor in the model, or by the one given to the optimizer.

Engines register their parameters in a weak table, so looking one up keeps no model alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsjob.optim.shards import local, own_part, whole
from dsjob.parallel import Strategy
from dsjob.ranks.joint import Meetings


class Owner(Protocol):
    """An engine, as far as this module needs it."""

    strategy: Strategy
    optimizer: Optimizer | None

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far."""


class Owned(NamedTuple):
    """A parameter of an engine, by name."""

    owner: Owner
    name: str

    @property
    def weight(self) -> Tensor:
        """The value that checkpoints store: the master, or the frozen parameter itself."""
        return self.owner.strategy.weights()[self.name]

    @property
    def master(self) -> Tensor | None:
        """The tensor that is trained; None for a frozen parameter."""
        return self.owner.strategy.masters.get(self.name)

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient, between the backward pass at the boundary and the step. With fp16, it is scaled."""
        carrier = self._carrier()
        return carrier.grad if carrier is not None else None

    @property
    def own_gradient(self) -> Tensor | None:
        """This rank's unreduced gradient, whole; None once `gradient` contains it."""
        return self.owner.strategy.own_gradient(self.name)

    def _carrier(self) -> Tensor | None:
        """The tensor with the gradient: the master, or before `step`, the model's copy in lower precision."""
        master = self.master
        if master is None or master.grad is not None:
            return master
        # The engine's `step` moves gradients from the model's copies to the masters (`finish_gradients`).
        shown = dict(self.owner.strategy.module.named_parameters()).get(self.name)
        return shown if shown is not None and shown.grad is not None else master

    def state(self, key: str) -> Tensor | None:
        """A tensor of the optimizer's state for this parameter."""
        master = self.master
        if master is None or self.owner.optimizer is None:
            return None
        value = self.owner.optimizer.state.get(master, {}).get(key)
        return value if isinstance(value, Tensor) else None


_ENTERED_BY_ALL = (
    "every rank must enter and leave it, with the same parameters, because each one has only a part of them: put "
    "`if rank == 0:` inside the `with`, not around it"
)
# For each engine: the meetings of its ranks before they gather parameters, and the step of the last one.
_met: WeakKeyDictionary[Owner, tuple[Meetings, int]] = WeakKeyDictionary()
# For each engine: (name, tensor) by id(tensor). Keeping the tensor keeps its id from being reused.
_known: WeakKeyDictionary[Owner, dict[int, tuple[str, Tensor]]] = WeakKeyDictionary()


def register(owner: Owner) -> None:
    """Registers the parameters of an engine, for as long as it exists, or until a new one takes its model over."""
    for earlier in [each for each in _known if each.strategy is owner.strategy]:
        forget(earlier)
    _known[owner], _met[owner] = {}, (Meetings(owner.strategy.world), -1)


def forget(owner: Owner) -> None:
    """Removes the parameters of an engine."""
    _known.pop(owner, None)


def find_owned(parameter: Tensor) -> Owned | None:
    """The engine and name of a parameter; None if it belongs to no engine."""
    for owner, by_id in list(_known.items()):
        name, found = by_id.get(id(parameter), ("", None))
        # Unknown so far, or replaced since: list the engine's tensors again.
        if found is not parameter:
            by_id.update({id(tensor): (name, tensor) for name, tensor in owner.strategy.shown()})
            name, found = by_id.get(id(parameter), ("", None))
        if found is parameter:
            return Owned(owner, name)
    return None


def list_alike(parameter: Tensor) -> Iterator[Tensor]:
    """The tensors by which an engine knows a parameter: itself, its shard or the whole, its master."""
    yield parameter
    owned = find_owned(parameter)
    if owned is not None:
        yield from (tensor for name, tensor in _known[owned.owner].values() if name == owned.name)


def meet_to_gather(parameters: Iterable[Tensor]) -> None:
    """Raises UsageError if another rank does not gather parameters of the same engines now.

    Checks only the first call in each step: programs gather parameter by parameter, and each meeting takes messages.
    """
    for owner in {id(owned.owner): owned.owner for each in parameters if (owned := find_owned(each))}.values():
        meetings, step = _met[owner]
        if step != owner.global_steps:
            _met[owner] = meetings, owner.global_steps
            meetings.meet("GatheredParameters", _ENTERED_BY_ALL)


def _read(
    parameter: Tensor, choose: Callable[[Owned], Tensor | None], part: Callable[[Tensor], Tensor]
) -> Tensor | None:
    owned = find_owned(parameter)
    value = choose(owned) if owned is not None else None
    if value is None:
        return None
    found = part(value.detach())
    return found.to(torch.float32 if found.is_floating_point() else found.dtype, copy=True)


def _read_gradient(parameter: Tensor, part: Callable[[Tensor], Tensor], *, own: bool = False) -> Tensor | None:
    found = _read(parameter, lambda owned: owned.own_gradient if own else owned.gradient, part)
    return None if found is None else found.mul_(_find_factor(parameter))


def _find_factor(parameter: Tensor) -> int:
    """What to multiply a reduced gradient by: gradients are always averaged, even if the config asks for a sum."""
    owned = find_owned(parameter)
    return owned.owner.strategy.gradient_factor if owned is not None else 1


@torch.no_grad()
def _write(
    parameter: Tensor, value: Tensor, choose: Callable[[Owned], Tensor | None], *, is_part: bool, weight: bool = False
) -> None:
    owned = find_owned(parameter)
    place = choose(owned) if owned is not None else None
    if owned is None or place is None:
        raise ValueError("this parameter does not belong to an engine, or does not have that value at the moment")
    local(place).copy_((value if is_part else own_part(value.to(place.device), place)).view_as(local(place)))
    if weight:
        owned.owner.strategy.weights_changed()


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """A parameter's fp32 value, whole; None if it is frozen, or belongs to no engine."""
    return _read(param, lambda owned: owned.master, whole)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets a parameter and its master to a value, which must be whole and the same on every rank."""
    _write(param, value, lambda owned: owned.weight, is_part=False, weight=True)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """A parameter's gradient as fp32, whole, between the backward pass at the boundary and the step.

    Before that, and inside `no_sync`, it is this rank's own sum if nothing of it has been reduced yet, and otherwise
    None. Reducing takes the mean over all ranks. With `gradient_allreduce_op` sum, both are multiplied by the number of
    ranks. With fp16, the gradient is still multiplied by the loss scale. For a parameter that cannot be sharded (0-dim
    or empty), stages 1 to 3 reduce the gradient in `engine.backward`, or else in `step`.
    """
    reduced = _read_gradient(param, whole)
    return _read_gradient(param, whole, own=True) if reduced is None else reduced


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replaces an existing gradient by a value, which must be whole and the same on every rank."""
    _write(param, value / _find_factor(param), lambda owned: owned.gradient, is_part=False)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A tensor of a parameter's optimizer state (`exp_avg`), whole; None before the first step."""
    return _read(param, lambda owned: owned.state(optim_state_key), whole)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets a tensor of a parameter's optimizer state to a value, which must be whole and the same on every rank."""
    _write(param, value, lambda owned: owned.state(optim_state_key), is_part=False)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's part of a parameter's fp32 value, with shape [rows of this rank, ...]."""
    return _read(param, lambda owned: owned.master, local)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets this rank's part of a parameter."""
    _write(param, value, lambda owned: owned.weight, is_part=True, weight=True)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient."""
    return _read_gradient(param, local)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Replaces this rank's part of a gradient."""
    _write(param, value / _find_factor(param), lambda owned: owned.gradient, is_part=True)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's part of a tensor of a parameter's optimizer state."""
    return _read(param, lambda owned: owned.state(optim_state_key), local)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of a tensor of a parameter's optimizer state."""
    _write(param, value, lambda owned: owned.state(optim_state_key), is_part=True)


def safe_update_full_grad_vectorized(param_list: Iterable[Tensor], update_func: Callable[..., Tensor]) -> None:
    """Replaces each existing gradient by `update_func(gradient, parameter)`, with whole gradients.

    Skips gradients that are not reduced yet at stages 1 to 3.
    """
    for param in param_list:
        gradient = _read_gradient(param, whole)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))
