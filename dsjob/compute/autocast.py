"""Automatic mixed precision by `torch.autocast`: which dtype, and whose gradients travel in it.

The model and its optimizer stay fp32; torch's policy decides which operators compute low. Gradients of "safe" modules
lose nothing by travelling low, since they were computed low.

At stage 0 DDP's hook splits each bucket by dtype. At stages 1 to 3 each safe module is an FSDP2 unit of its own, since
a unit has one dtype; linear and convolution layers are also gathered low at stage 3. Safe classes are found by name
among loaded modules, so a config imports nothing. While gradients accumulate at stage 1, FSDP2 keeps those of safe
modules in the lower precision.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from dsjob.errors import TargetError

DEFAULT_SAFE_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MARK = "_dsjob_autocast_dtype"


def cast_operators(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """A context in which operators compute in `dtype` by torch's policy; None: in the dtypes of their operands.

    An autocast around it does not count: the engine computes as its document says.
    """
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def find_safe_modules(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """The modules in `model` of the classes that `names` (dotted) lists, by default `DEFAULT_SAFE_MODULES`.

    Left out are those that share a parameter with another module, which has to travel in one dtype, and those whose
    parameters are not all their own. Raises TargetError for a name that is no class of what is loaded; nothing is
    imported.
    """
    classes = DEFAULT_SAFE_MODULES if names is None else tuple(_find_class(name) for name in names)
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found = []
    for module in (module for module in model.modules() if type(module) in classes):
        own = list(module.parameters(recurse=False))
        if own and len(own) == len(list(module.parameters())) and all(owners[id(p)] == 1 for p in own):
            found.append(module)
    return found


def _find_class(name: str) -> type:
    package, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(package), attribute, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise TargetError(
            f"torch_autocast.lower_precision_safe_modules: {name} is no module class that the model has loaded",
            hint='dotted names, ["torch.nn.Linear", "torch.nn.Conv2d"] for example',
        )
    return found


def mark(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Says of `parameter` that its gradient travels in `dtype`."""
    setattr(parameter, MARK, dtype)


def marked_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """The dtype that `parameter` was marked with, if it was."""
    dtype: torch.dtype | None = getattr(parameter, MARK, None)
    return dtype
