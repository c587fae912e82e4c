"""Finds out how a model that is not written as layers can be divided among stages.

Its *units* are the repeated blocks, and the largest other modules with parameters that contain no block. A forward pass
calls them in some order, with code in between (masks, positions, residual sums). To learn what a later call needs of an
earlier one, one forward pass is traced: each unit computes on the meta device, and all other operators run for real, so
that code may look at the batch. Each tensor is marked with the outputs of calls and the parameters that it was computed
from. A call hides what its outputs were computed from.

So a stage can run the model's own `forward`: earlier calls return what the earlier stages have sent, or zeros where
nobody looks at them any more, and the pass ends at the first call of a later stage (`walk`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.compute.find_blocks import find_blocks
from dsjob.errors import ContractError, UsageError
from dsjob.pipelines.partition import partition
from dsjob.torch_private import (
    TorchDispatchMode,
    address_of,
    call_with_meta,
    count_changes,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

Mark = tuple[int, int] | str  # (call, leaf of its output), or the name of a parameter
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Traced:
    """A forward pass. calls: names of the units that it called, in order. needs: for each call, the marks of its
    arguments; and at the end those of the model's output. changed: outputs of calls that code outside of units changed
    in place."""

    calls: Sequence[str]
    needs: Sequence[frozenset[Mark]]
    changed: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Cut:
    """How a model is divided into `count` parts, which are numbered in the order of the forward pass.

    units: the names of all units. calls: of those that a forward pass calls, in order. part_of: for each call, the part
    that it belongs to. crossing: for each part, the outputs of calls, (call, leaf), that it receives. changed: outputs
    that code between calls changes in place; it does so on each stage. owners: the names of the model's parameters,
    each with the parts that use it. groups: the blocks of each part, for messages.
    """

    count: int
    units: Sequence[str]
    calls: Sequence[str]
    part_of: Sequence[int]
    crossing: Sequence[Sequence[tuple[int, int]]]
    changed: Collection[tuple[int, int]]
    owners: Mapping[str, tuple[int, ...]]
    groups: Sequence[Sequence[str]]


def list_units(model: nn.Module) -> dict[str, nn.Module]:
    """The units of a model by their first names, in the order of the model. Raises ContractError without blocks."""
    blocks = {id(block) for block in find_blocks(model, sharing=True)}
    if not blocks:
        raise ContractError(
            f"{type(model).__name__} cannot be divided into pipeline stages: it has no repeated blocks",
            hint="blocks are siblings of the same class in an nn.ModuleList or nn.Sequential; or list the layers in"
            " dsjob.Layers",
        )
    holding = {id(module) for module in model.modules() if any(id(inner) in blocks for inner in module.modules())}
    found: dict[str, nn.Module] = {}

    def search(module: nn.Module, name: str) -> None:
        inside = id(module) in holding and id(module) not in blocks
        if inside or isinstance(module, _LISTS) or not name:
            for key, child in module.named_children():
                search(child, f"{name}.{key}" if name else key)
        elif any(True for _ in module.parameters()) and all(module is not each for each in found.values()):
            found[name] = module

    search(model, "")
    return found


def trace(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """Traces a forward pass of a model on the CPU. args, kwargs: what it is called with, on the CPU.

    Raises ContractError if a unit cannot compute without values.
    """
    args, kwargs = tree_map_only(Tensor, torch.clone, (tuple(args), dict(kwargs)))  # the model may change them in place
    tracer = _Tracer(model)
    with tracer.replacing_units(), torch.no_grad(), torch.random.fork_rng([]), tracer:
        outputs = model(*args, **kwargs)
    return Traced(tracer.calls, [*tracer.needs, tracer.read(outputs)], tracer.list_changed())


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks tensors with what they were computed from."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = list_units(model)
        # By storage, since what is written to a view is read from other tensors. Keeping a tensor keeps its storage.
        self._marks: dict[int, tuple[Tensor, frozenset[Mark]]] = {}
        for name, parameter in model.named_parameters():
            self._add(parameter, frozenset([name]))
        self.calls: list[str] = []
        self.needs: list[frozenset[Mark]] = []
        self._made: dict[tuple[int, int], tuple[Tensor, int]] = {}  # outputs, and how often they had been changed
        self._inside = False  # a unit

    def read(self, value: Any) -> frozenset[Mark]:
        """The marks of all tensors in a value."""
        keys = [_identify(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return frozenset().union(*(self._marks[key][1] for key in keys if key in self._marks))

    def _add(self, tensor: Tensor, marks: frozenset[Mark]) -> None:
        kept, before = self._marks.get(_identify(tensor), (tensor, frozenset()))
        self._marks[_identify(tensor)] = (kept, marks | before)

    def list_changed(self) -> frozenset[tuple[int, int]]:
        """The outputs of calls that were changed in place."""
        return frozenset(place for place, (made, before) in self._made.items() if count_changes(made) > before)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        outputs = operator(*args, **given)
        if not self._inside and (marks := self.read((args, given))):
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor):
                    self._add(leaf, marks)
        return outputs

    @contextmanager
    def replacing_units(self) -> Iterator[None]:
        """Within, calls of units are noted, and return zeros."""
        own: dict[str, Any] = {name: vars(unit).get("forward") for name, unit in self._units.items()}
        for name, unit in self._units.items():
            unit.forward = self._replace(name, unit, unit.forward)
        try:
            yield
        finally:
            for name, unit in self._units.items():
                del unit.forward
                if own[name] is not None:
                    unit.forward = own[name]

    def _replace(self, name: str, unit: nn.Module, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            number = len(self.calls)
            self.calls.append(name)
            self.needs.append(self.read((args, kwargs)))
            self._inside = True
            try:
                shapes = shape_outputs(name, unit, args, kwargs)
            finally:
                self._inside = False
            leaves, spec = tree_flatten(shapes)
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    leaves[place] = made = torch.zeros(leaf.shape, dtype=leaf.dtype)
                    self._add(made, frozenset([(number, place)]))
                    self._made[number, place] = (made, count_changes(made))
            return tree_unflatten(leaves, spec)

        return call


def _identify(tensor: Tensor) -> int:
    return address_of(tensor) if tensor.layout is torch.strided else id(tensor)


def shape_outputs(name: str, unit: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a unit returns for these arguments, with tensors on the meta device. Raises ContractError."""
    try:
        return call_with_meta(unit, args, kwargs)
    except Exception as error:
        raise ContractError(
            f"the model cannot be divided into pipeline stages by itself: {name} ({type(unit).__name__}) does not run"
            f" on the meta device, where tensors have no values: {error}",
            hint="list the model's layers in dsjob.Layers",
        ) from error


def cut_model(model: nn.Module, traced: Traced, count: int, method: str) -> Cut:
    """Divides a traced model into `count` parts, between its blocks. method: see `pipelines.partition`.

    Raises UsageError for fewer blocks than parts, ContractError for a model that calls its units in another order than
    it has them in.
    """
    units = list_units(model)
    groups, bounds = _divide_units(model, units, count, method)
    part_of_unit = _list_parts(groups, bounds)
    part_of = _place_calls(traced, part_of_unit, _find_candidates(model, units, part_of_unit))
    ends = [*part_of, count - 1]
    return Cut(
        count,
        list(units),
        traced.calls,
        part_of,
        [_find_crossing(traced, ends, part) for part in range(count)],
        traced.changed,
        _find_owners(model, units, traced, ends),
        [[name for group in groups[bounds[part] : bounds[part + 1]] for name in group] for part in range(count)],
    )


def _divide_units(
    model: nn.Module, units: Mapping[str, nn.Module], count: int, method: str
) -> tuple[list[list[str]], list[int]]:
    """The units in groups with one block each, and the first group of each part, and the number of groups."""
    groups = _group(model, units)
    weights = [
        sum(p.numel() for unit in group for p in units[unit].parameters() if p.requires_grad) for group in groups
    ]
    blocks = {id(block) for block in find_blocks(model, sharing=True)}
    kinds = [next(type(units[name]).__name__ for name in group if id(units[name]) in blocks) for group in groups]
    return groups, list(partition(method, count, names=kinds, parameters=weights))


def _list_parts(groups: Sequence[Sequence[str]], bounds: Sequence[int]) -> dict[str, int]:
    """The part of each unit."""
    pairs = enumerate(pairwise(bounds))
    return {unit: part for part, (start, end) in pairs for group in groups[start:end] for unit in group}


def guess_owned(model: nn.Module, count: int, method: str, own: Collection[int]) -> set[str]:
    """The names of the parameters that some of `count` parts probably have, as far as can be told before the model is
    traced: those of their units, and all that lie outside of units. Raises as `cut_model`."""
    units = list_units(model)
    candidates = _find_candidates(model, units, _list_parts(*_divide_units(model, units, count, method)))
    inside = {id(p): False for unit in units.values() for p in unit.parameters()}
    inside |= {id(p): True for name, unit in units.items() if candidates[name] & set(own) for p in unit.parameters()}
    return {name for name, parameter in model.named_parameters() if inside.get(id(parameter), True)}


def _group(model: nn.Module, units: Mapping[str, nn.Module]) -> list[list[str]]:
    """The units in groups with one block each: units between two blocks belong to the one that they are nearer to in
    the tree of modules; those in front to the first block, those behind to the last."""
    blocks = {id(block) for block in find_blocks(model, sharing=True)}
    groups: list[list[str]] = []
    waiting: list[str] = []
    for name, unit in units.items():
        if id(unit) not in blocks:
            waiting.append(name)
            continue
        last = groups[-1][-1] if groups else ""
        nearer = [other for other in waiting if groups and _common(other, last) >= _common(other, name)]
        if groups:
            groups[-1] += nearer
        groups.append([*(other for other in waiting if other not in nearer), name])
        waiting = []
    groups[-1] += waiting
    return groups


def _common(first: str, second: str) -> int:
    """How many parts of two names are equal, from the left."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), 10**6)


def _find_candidates(
    model: nn.Module, units: Mapping[str, nn.Module], part_of_unit: Mapping[str, int]
) -> dict[str, set[int]]:
    """The parts that a unit may be called in: more than one for a module that the model has in several places."""
    parents: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parents.setdefault(id(module), []).append(name)
    found = {}
    for unit, module in units.items():
        there = {part_of_unit[unit]}
        for name in parents[id(module)][1:]:
            # The part of the first unit below the same parent that has a part of its own.
            parent = name.rpartition(".")[0]
            there |= {part_of_unit[other] for other in units if parent and other.startswith(f"{parent}.")} or set()
        found[unit] = there
    return found


def _place_calls(traced: Traced, part_of_unit: Mapping[str, int], candidates: Mapping[str, set[int]]) -> list[int]:
    """The part of each call. A unit with several places is called in the latest that the next call allows."""
    parts: list[int] = []
    following = max(part_of_unit.values())
    for name in reversed(traced.calls):
        fits = [part for part in candidates[name] if part <= following]
        if not fits:
            raise ContractError(
                f"the model cannot be divided into pipeline stages by itself: it calls {name} before a layer that it"
                " has in front of it",
                hint="define the layers in the order in which forward calls them, or list them in dsjob.Layers",
            )
        following = max(fits)
        parts.append(following)
    return parts[::-1]


def _find_crossing(traced: Traced, ends: Sequence[int], part: int) -> list[tuple[int, int]]:
    """What a part receives: outputs of earlier calls that its calls, or later ones, need."""
    later = [needs for needs, end in zip(traced.needs, ends, strict=True) if end >= part]
    wanted = {mark for needs in later for mark in needs if not isinstance(mark, str)}
    return sorted(mark for mark in wanted if ends[mark[0]] < part)


def _find_owners(
    model: nn.Module, units: Mapping[str, nn.Module], traced: Traced, ends: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The parts that use each parameter: in a call of its unit, or because something that was computed from it outside
    of units reaches a call."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, set[int]] = {name: set() for name in names.values()}
    for call, part in zip(traced.calls, ends, strict=False):
        for parameter in units[call].parameters():
            found[names[id(parameter)]].add(part)
    for needs, part in zip(traced.needs, ends, strict=True):
        for mark in needs:
            if isinstance(mark, str):
                found[mark].add(part)
    # A parameter that nothing uses stays on the first stage.
    return {name: tuple(sorted(parts)) or (0,) for name, parts in found.items()}


def require_blocks(model: nn.Module, count: int) -> None:
    """Raises UsageError if a model has fewer blocks than parts."""
    blocks = len(find_blocks(model, sharing=True))
    if blocks < count:
        raise UsageError(f"{blocks} blocks cannot be divided among {count} stages", hint="use fewer stages")
