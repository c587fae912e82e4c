"""Runs a stage of a model that is not written as layers: its own `forward`, with the calls of one part alone.

See `calls` for how a model is divided.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.errors import ContractError
from dsjob.parallel.pipeline.calls import Cut, list_units, shape_outputs
from dsjob.parallel.pipeline.layers import Received
from dsjob.parallel.pipeline.stage import Stage
from dsjob.torch_private import list_children, own_parameters, replace_child, tree_flatten, tree_leaves, tree_unflatten


class _EndOfPart(BaseException):  # ends a forward pass; a model must not catch it
    """The forward pass has reached the first call of a later part."""


class Absent(nn.Module):
    """Stands for a unit of other stages. It has the parameters of the unit that this stage needs elsewhere, and the
    attributes of the unit's copy without values."""

    def stand_for(self, unit: nn.Module) -> None:
        """Has the attributes of `unit` from now on."""
        self.__dict__["unit"] = unit  # not as a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "unit" not in self.__dict__:
                raise
            value = getattr(self.__dict__["unit"], name)
            return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


class Walk:
    """The `forward` of a model of which this rank has some parts."""

    def __init__(self, model: nn.Module, cut: Cut, own: tuple[int, ...]) -> None:
        """own: the rank's parts, one for each of its chunks."""
        self._forward, self._cut, self._own = model.forward, cut, own
        # The units without values, which tell the shapes of what earlier calls return.
        self._twins = {name: _copy_to_meta(unit) for name, unit in list_units(model).items()}
        self._part, self._number = -1, 0  # of the pass that is running, and of its next call
        self._values: dict[tuple[int, int], Tensor] = {}  # outputs of calls that later ones need
        self._shapes: dict[Any, tuple[list[Any], Any]] = {}
        self._zeros: dict[Any, Tensor] = {}

    def use_dtype(self, dtype: torch.dtype) -> None:
        """Computes shapes as if the model's parameters had this dtype."""
        for twin in self._twins.values():
            twin.to(dtype)

    def __call__(
        self, *args: Any, pipe_chunk: int | None = None, pipe_received: Received | None = None, **kwargs: Any
    ) -> Any:
        """Runs a part: the model's output for the last part, else the tensors to send."""
        if pipe_chunk is None:
            raise ContractError("a model in a pipeline cannot be called by itself: each rank has only a part of it")
        part = self._own[pipe_chunk]
        incoming = self._cut.crossing[part]
        received = pipe_received.value if pipe_received is not None else ()
        self._part, self._number, self._values = part, 0, dict(zip(incoming, received, strict=True))
        try:
            outputs = self._forward(*args, **kwargs)
        except _EndOfPart:
            return tuple(self._values[mark] for mark in self._cut.crossing[part + 1])
        finally:
            self._part, self._values = -1, {}
        if part < self._cut.count - 1:
            raise ContractError(f"the forward pass ended in part {part + 1} of {self._cut.count} of the pipeline")
        return outputs

    def twin(self, name: str) -> nn.Module:
        """A unit without values."""
        return self._twins[name]

    def call(self, name: str, forward: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """One call of a unit. forward: its own; None if it is on other stages."""
        if self._part < 0:
            if forward is None:
                raise ContractError(f"{name} is on another stage of the pipeline")
            return forward(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        if number >= len(self._cut.calls) or self._cut.calls[number] != name:
            raise ContractError(
                f"the model called {name}, but another layer when it was divided into pipeline stages",
                hint="the order of layers must not depend on the batch; or list them in dsjob.Layers",
            )
        part = self._cut.part_of[number]
        if part > self._part:
            raise _EndOfPart
        if part < self._part:
            return self._stand_in(number, args, kwargs)
        assert forward is not None
        outputs = forward(*args, **kwargs)
        if self._part + 1 < self._cut.count:
            wanted = [leaf for call, leaf in self._cut.crossing[self._part + 1] if call == number]
            leaves = tree_leaves(outputs) if wanted else []
            self._values.update({(number, leaf): self._guard((number, leaf), leaves[leaf]) for leaf in wanted})
        return outputs

    def _guard(self, place: tuple[int, int], output: Tensor) -> Tensor:
        """An output, or a copy of it if the model goes on to change it in place: the next stage repeats that."""
        return output.clone() if place in self._cut.changed else output

    def _stand_in(self, number: int, args: Any, kwargs: Any) -> Any:
        """What an earlier call returned: tensors that were received, and zeros in place of those that nobody needs."""
        given, spec = tree_flatten((args, kwargs))
        key = (number, spec, tuple(map(_identify, given)))
        if key not in self._shapes:
            if len(self._shapes) > 10_000:  # of a model with batches of ever new shapes
                self._shapes.clear()
            name = self._cut.calls[number]
            self._shapes[key] = tree_flatten(shape_outputs(name, self._twins[name], args, kwargs))
        shapes, form = self._shapes[key]
        device = next((x.device for x in given if isinstance(x, Tensor)), torch.device("cpu"))
        leaves = [
            self._guard((number, place), self._values.get((number, place), self._make_zeros(leaf, device)))
            if isinstance(leaf, Tensor)
            else leaf
            for place, leaf in enumerate(shapes)
        ]
        return tree_unflatten(leaves, form)

    def _make_zeros(self, like: Tensor, device: torch.device) -> Tensor:
        key = (like.shape, like.dtype, device)
        if key not in self._zeros:
            if len(self._zeros) > 100:
                self._zeros.clear()
            self._zeros[key] = torch.zeros(like.shape, dtype=like.dtype, device=device)
        return self._zeros[key]


def take_part(model: nn.Module, cut: Cut, *, rank: int, ranks: int) -> Stage:
    """Leaves of a model only the parts of one rank: those whose number is `rank` modulo `ranks`."""
    own = tuple(range(rank, cut.count, ranks))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {name for name, parts in cut.owners.items() if set(parts) & set(own)}
    walk = Walk(model, cut, own)
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # of each module: the modules that have it, and as what
    for parent in model.modules():
        for key, child in list_children(parent).items():
            places.setdefault(id(child), []).append((parent, key))
    units = list_units(model)
    called = {name: {part for call, part in zip(cut.calls, cut.part_of, strict=True) if call == name} for name in units}
    for name, unit in units.items():
        if called[name] & set(own):
            unit.forward = Counted(walk, name, unit.forward)
            continue
        absent = Absent()
        for below, parameter in list(unit.named_parameters(remove_duplicate=False)):
            if names[id(parameter)] in kept:
                _register(absent, below, parameter)
        absent.forward = Counted(walk, name, None)
        absent.stand_for(walk.twin(name))
        for parent, key in places[id(unit)]:
            replace_child(parent, key, absent)
    _drop_direct(model, names, kept)
    model.forward = walk
    owners = {name: tuple(sorted({part % ranks for part in parts})) for name, parts in cut.owners.items()}
    kinds = [type(unit).__name__ for unit in units.values()]
    return Stage(model, owners, len(own), takes_batch=True, kinds=kinds)


class Counted:
    """The `forward` of a unit, which the walk counts. own: the unit's; None if it is on other stages."""

    def __init__(self, walk: Walk, name: str, own: Callable[..., Any] | None) -> None:
        self._walk, self._name, self.own = walk, name, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._walk.call(self._name, self.own, args, kwargs)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Makes a module compute by another function of itself and its inputs. In a pipeline, its calls stay counted."""
    # A bound method, so that a copy of the module calls it with its own weights.
    bound, counted = MethodType(forward, module), vars(module).get("forward")
    if isinstance(counted, Counted):
        counted.own = bound
    else:
        module.forward = bound


def _copy_to_meta(module: nn.Module) -> nn.Module:
    """A copy of a module without values. Its tensors are never copied."""
    tensors = [*module.parameters(), *module.buffers()]
    memo = {id(tensor): _without_values(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo)


def _without_values(tensor: Tensor) -> Tensor:
    bare = tensor.detach().to("meta")
    return nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare


def _identify(value: Any) -> Any:
    """What the shapes of outputs may depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return value if isinstance(value, (bool, int, float, str)) else type(value)


def _register(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Adds a parameter below `module` under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, nn.Parameter(parameter) if not isinstance(parameter, nn.Parameter) else parameter)


def _drop_direct(model: nn.Module, names: Mapping[int, str], kept: set[str]) -> None:
    """Replaces parameters that other stages have, and that belong to no unit, by zeros."""
    for module in list(model.modules()):
        for key, parameter in list(own_parameters(module).items()):
            if parameter is not None and id(parameter) in names and names[id(parameter)] not in kept:
                delattr(module, key)
                setattr(module, key, torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
