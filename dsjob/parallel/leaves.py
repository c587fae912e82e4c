"""DeepSpeed's names for leaves: modules that are sharded and gathered as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dsjob.compute.find_blocks import find_by_name, find_by_suffix, find_of_classes, is_leaf, mark_leaf
from dsjob.errors import UsageError


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Sets whether a module is a leaf: all parameters inside are sharded and gathered together. Call it before
    `initialize`."""
    mark_leaf(model, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Makes all modules in `model` of these classes (or class names, dotted or not) leaves. This suits experts, for
    example, of which ranks use different ones. Returns the modules; raises UsageError if there are none."""
    found, _ = find_of_classes(model, leaf_module_classes)
    if not found and raise_if_not_found:
        raise UsageError(f"the model has no module of the classes {list(leaf_module_classes)}")
    for module in found:
        mark_leaf(module)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Sets or (with `flag` False) clears the leaf flag of the modules with these names. Returns the modules, and names
    that were not found. Raises UsageError for such names."""
    return _mark_all(find_by_name(model, module_names), flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Like `set_z3_leaf_modules_by_name`, for modules whose names end in one of these suffixes."""
    return _mark_all(find_by_suffix(model, module_name_suffixes), flag, raise_if_not_found)


def _mark_all(
    found: tuple[list[nn.Module], list[str]], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    modules, missing = found
    if missing and raise_if_not_found:
        raise UsageError(f"the model has no module named {' or '.join(missing)}")
    for module in modules:
        mark_leaf(module, flag)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Reverses `set_z3_leaf_modules`."""
    found = set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        mark_leaf(module, False)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All leaf modules in `model`."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is a leaf."""
    return is_leaf(model)
