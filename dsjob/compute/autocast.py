"""Automatic mixed precision with `torch.autocast`: the dtype, and which gradients are communicated in it.

The model and its optimizer stay in fp32; torch's policy decides which operators compute in the lower precision.
Gradients of "safe" modules are computed in it anyway, so communicating them in it loses nothing.

At stage 0, DDP's hook splits each bucket by dtype. At stages 1 to 3, each safe module is an FSDP2 unit of its own,
because a unit has only one dtype; at stage 3, linear and convolution layers are also gathered in the lower precision.
While gradients accumulate at stage 1, FSDP2 keeps those of safe modules in the lower precision.
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
    """A context in which operators compute in `dtype`, by torch's policy. None: in the dtypes of their operands.

    It overrides an autocast context around it, since the engine follows its document.
    """
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def find_safe_modules(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """The modules in `model` whose class is in `names` (dotted), by default in `DEFAULT_SAFE_MODULES`.

    Excludes modules that share a parameter with another module (it can only be communicated in one dtype), and modules
    whose children have parameters. Raises TargetError for a name that is not a loaded module class; imports nothing.
    """
    classes = DEFAULT_SAFE_MODULES if names is None else tuple(_find_class(name) for name in names)
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found = []
    for module in (module for module in model.modules() if type(module) in classes):
        own = list(module.parameters(recurse=False))
        # `own`: direct parameters. Equal lengths mean that children have none.
        if own and len(own) == len(list(module.parameters())) and all(owners[id(p)] == 1 for p in own):
            found.append(module)
    return found


def _find_class(name: str) -> type:
    package, _, attribute = name.rpartition(".")
    # Only among loaded modules: a document must not import code by naming a class here.
    found = getattr(sys.modules.get(package), attribute, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise TargetError(
            f"torch_autocast.lower_precision_safe_modules: {name} is not a loaded module class",
            hint='use dotted names, for example ["torch.nn.Linear", "torch.nn.Conv2d"]',
        )
    return found


def mark(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Marks `parameter`: its gradient is communicated in `dtype`."""
    setattr(parameter, MARK, dtype)


def marked_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """The dtype that `parameter` was marked with, or None."""
    dtype: torch.dtype | None = getattr(parameter, MARK, None)
    return dtype
