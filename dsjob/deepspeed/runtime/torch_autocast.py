"""`deepspeed.runtime.torch_autocast`: autocast that a program switches on after `initialize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from dsjob.compute.autocast import DEFAULT_SAFE_MODULES, MARK, find_safe_modules, mark, marked_dtype
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError

PARAM_COMM_DTYPE_ATTR_NAME = MARK  # the attribute of a parameter whose gradient travels low


def init_autocast_params(engine: Engine, dtype: torch.dtype, safe_modules: Sequence[str] | None = None) -> None:
    """Switches autocast to `dtype` on for an engine on one rank; `safe_modules`: classes, by dotted name.

    On several ranks the config has to say it, since it settles how the model is spread: raises UsageError there.
    """
    if engine.world.data_size > 1 or torch.float16 in (dtype, engine.precision.compute):
        raise UsageError(
            "autocast on several ranks, or to float16, cannot be switched on afterwards",
            hint='give it in the config: "torch_autocast": {"enabled": true, "dtype": ...}',
        )
    engine.precision = dataclasses.replace(engine.precision, autocast=dtype, safe=safe_modules)
    engine.strategy.autocast = dtype
    for module in find_safe_modules(engine.module, safe_modules):
        for parameter in module.parameters():
            mark(parameter, dtype)


def is_autocast_initialized(engine: Engine) -> bool:
    """Whether the engine's forward passes run under torch.autocast."""
    return engine.precision.autocast is not None


def get_autocast_dtype(engine: Engine) -> torch.dtype | None:
    """The dtype that operators are lowered to; None without autocast."""
    return engine.precision.autocast


def get_default_autocast_lower_precision_modules() -> list[str]:
    """The classes that are safe where the config lists none, by dotted name."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in DEFAULT_SAFE_MODULES]


def has_autocast_dtype(parameter: torch.Tensor) -> bool:
    """Whether the parameter's gradient travels in the lower precision."""
    return marked_dtype(parameter) is not None


has_comm_dtype = has_autocast_dtype


def get_comm_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype that autocast has the parameter's gradient travel in; the parameter's own where it has none."""
    return marked_dtype(parameter) or parameter.dtype
