"""Finds the repeated blocks of a model, which become units of sharding, recomputation and compilation.

Blocks are siblings of the same class in a list, are built of several layers, and share no parameter with the rest of
the model.
Blocks with less than a million elements are units of their own only at stage 3 (`contract.sharding`): at lower stages,
everything is gathered at once, and the hooks and collectives of small units would cost more than they hide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from dsjob.contract.zero import LeafModule

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LEAF = "_z3_leaf"  # the name that DeepSpeed gives it, which programs read
_EXTERNAL = "_dsjob_external"
_BLOCK = "_dsjob_block"
_UNIT = "_dsjob_unit"


def mark_leaf(module: nn.Module, flag: bool = True) -> None:
    """Marks a module: nothing inside it becomes a unit of its own, because ranks may use different parts of it."""
    setattr(module, _LEAF, flag)


def is_leaf(module: nn.Module) -> bool:
    """Whether `mark_leaf` was called with this module."""
    return bool(getattr(module, _LEAF, False))


def mark_external(parameter: Tensor) -> None:
    """Marks a parameter: modules other than its owner use it too."""
    setattr(parameter, _EXTERNAL, True)


def is_external(parameter: Tensor) -> bool:
    """Whether `mark_external` was called with this parameter."""
    return getattr(parameter, _EXTERNAL, False)


def mark_block(module: nn.Module) -> None:
    """Marks a module: it is a block, whatever is beside it."""
    setattr(module, _BLOCK, True)


def mark_unit(module: nn.Module) -> None:
    """Marks a layer: stage 3 shards and gathers it by itself, also inside a block."""
    setattr(module, _UNIT, True)


def find_units(model: nn.Module) -> list[nn.Module]:
    """The layers that `mark_unit` was called with."""
    return [module for module in model.modules() if getattr(module, _UNIT, False)]


Found = tuple[list[nn.Module], list[str]]  # modules found, and requested names that were not found


def mark_leaves(model: nn.Module, section: LeafModule | None) -> list[str]:
    """Marks the modules that the config's `leaf_module` names. Returns the names that were not found.

    Classes count as missing only if nothing is found at all: their list may be meant for several models.
    """
    if section is None:
        return []
    classes, names, suffixes = (_as_list(given) for given in (section.classes, section.names, section.name_suffixes))
    finds = [find_of_classes(model, classes), find_by_name(model, names), find_by_suffix(model, suffixes)]
    modules = [module for found, _ in finds for module in found]
    for module in modules:
        mark_leaf(module)
    return [name for _, missing in (finds[1:] if modules else finds) for name in missing]


def _as_list(given: Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def find_of_classes(model: nn.Module, classes: Sequence[type | str]) -> Found:
    """Modules of these classes. A string is the name of a class, dotted or not."""

    def is_one(module: nn.Module, wanted: type | str) -> bool:
        kind = type(module)
        names = {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
        return wanted in names if isinstance(wanted, str) else isinstance(module, wanted)

    modules = list(model.modules())
    missing = [str(wanted) for wanted in classes if not any(is_one(module, wanted) for module in modules)]
    return [module for module in modules if any(is_one(module, wanted) for wanted in classes)], missing


def find_by_name(model: nn.Module, names: Sequence[str]) -> Found:
    """The modules with these names in the model, in the order of `names`."""
    modules = dict(model.named_modules())
    return [modules[name] for name in names if name in modules], [name for name in names if name not in modules]


def find_by_suffix(model: nn.Module, suffixes: Sequence[str]) -> Found:
    """The modules whose names end in one of `suffixes`."""
    named = list(model.named_modules())
    missing = [suffix for suffix in suffixes if not any(name.endswith(suffix) for name, _ in named)]
    return [module for name, module in named if name.endswith(tuple(suffixes))], missing


def find_blocks(model: nn.Module, *, sharing: bool = False) -> list[nn.Module]:
    """The outermost repeated blocks of a model, in order: siblings of one class in a list, built of several layers.

    Omits a block that shares a parameter with anything outside it, because a parameter can be sharded in only one unit.
    The block then belongs to the rest of the model. Also omits blocks with a parameter marked by `mark_external`.
    sharing: include such blocks.
    """
    found = [block for block in _search(model) if any(True for _ in block.parameters())]
    if sharing:
        return found
    # How many units use each parameter. With two or more, no single unit can own it.
    owners: Counter[int] = Counter()
    for parameter_id in _owned_ids(model, found):
        owners[parameter_id] += 1
    return [block for block in found if all(owners[id(p)] == 1 and not is_external(p) for p in block.parameters())]


def _search(module: nn.Module) -> Iterator[nn.Module]:
    """All candidates below `module`, outermost first: does not look for blocks inside a block."""
    if is_leaf(module):
        return
    children = list(module.children())
    blocks = [child for child in children if getattr(child, _BLOCK, False)]
    if isinstance(module, _CONTAINERS):
        counts = Counter(type(child) for child in children)
        blocks += [child for child in children if counts[type(child)] > 1 and _is_composed(child)]
    for child in children:
        # A list inside a list is searched instead: its items may be the blocks.
        if any(child is block for block in blocks) and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from _search(child)


def _is_composed(module: nn.Module) -> bool:
    """Whether a module is built of several layers. One such as nn.Linear is too small to be gathered on its own.

    A fused layer such as DeepSpeed's holds all matrices itself, instead of in children. So does a recurrent network,
    which is one layer all the same.
    """
    matrices = sum(parameter.dim() == 2 for parameter in module.parameters(recurse=False))
    return any(True for _ in module.children()) or (matrices > 2 and not isinstance(module, nn.RNNBase))


def _owned_ids(model: nn.Module, blocks: list[nn.Module]) -> Iterator[int]:
    """The ids of all parameters, each once per unit that uses it. (Everything outside the blocks is one unit.)"""
    inside = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        yield from (id(parameter) for parameter in block.parameters())
    for module in model.modules():
        if id(module) not in inside:
            yield from (id(parameter) for parameter in module.parameters(recurse=False))
