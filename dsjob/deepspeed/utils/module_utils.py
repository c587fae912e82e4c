"""`deepspeed.utils.module_utils`: a part of a model by its dotted name."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The part of `model` with this name, for example `layers.0.attention`."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Puts `module` where the part of `model` with this name was."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


__getattr__ = _explain_names(__name__)
