"""Finding the units to shard in a model that says nothing about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from dsjob.parallel.presharded import is_external

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


_LEAF = "_dsjob_leaf"


def mark_leaf(module: nn.Module, flag: bool = True) -> None:
    """Says of a module that nothing inside it is a unit of its own: ranks may use different parts of it."""
    setattr(module, _LEAF, flag)


def is_leaf(module: nn.Module) -> bool:
    """Whether `mark_leaf` was called of it."""
    return bool(getattr(module, _LEAF, False))


def find_blocks(model: nn.Module, *, sharing: bool = False) -> list[nn.Module]:
    """The repeated blocks of a model, outermost ones, in order: siblings of one class in a list, each made of parts.

    A block that shares a parameter with anything outside it is left out, since one parameter can be sharded in one
    unit alone: it then belongs to what remains of the model. So is one with a parameter that was said to be used
    elsewhere. `sharing`: it is listed all the same.
    """
    found = [block for block in _search(model) if any(True for _ in block.parameters())]
    if sharing:
        return found
    owners: Counter[int] = Counter()
    for parameter_id in _owned_ids(model, found):
        owners[parameter_id] += 1
    return [block for block in found if all(owners[id(p)] == 1 and not is_external(p) for p in block.parameters())]


def _search(module: nn.Module) -> Iterator[nn.Module]:
    if is_leaf(module):
        return
    children = list(module.children())
    if isinstance(module, _CONTAINERS):
        counts = Counter(type(child) for child in children)
        blocks = [c for c in children if counts[type(c)] > 1 and any(True for _ in c.children())]
    else:
        blocks = []
    for child in children:
        if any(child is block for block in blocks) and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from _search(child)


def _owned_ids(model: nn.Module, blocks: list[nn.Module]) -> Iterator[int]:
    """The ids of all parameters, once for each unit that uses them."""
    inside = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        yield from (id(parameter) for parameter in block.parameters())
    for module in model.modules():
        if id(module) not in inside:
            yield from (id(parameter) for parameter in module.parameters(recurse=False))
