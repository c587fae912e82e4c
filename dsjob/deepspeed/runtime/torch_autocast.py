"""`deepspeed.runtime.torch_autocast`: enables autocast after `initialize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from dsjob.compute.autocast import DEFAULT_SAFE_MODULES, MARK, find_safe_modules, mark, marked_dtype
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.parallel.parameters import list_alike

PARAM_COMM_DTYPE_ATTR_NAME = MARK  # marks parameters whose gradient is reduced in the lower precision


def init_autocast_params(engine: Engine, dtype: torch.dtype, safe_modules: Sequence[str] | None = None) -> None:
    """Enables autocast to `dtype` for an engine on a single rank. `safe_modules`: dotted names of classes.

    Raises UsageError on several ranks: there, autocast must be in the config, because the dtypes of collectives are
    fixed when the model is distributed.
    """
    if engine.world.data_size > 1 or torch.float16 in (dtype, engine.precision.compute):
        raise UsageError(
            "autocast on several ranks, or to float16, cannot be enabled after initialize",
            hint='set it in the config: "torch_autocast": {"enabled": true, "dtype": ...}',
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
    """The lower precision that autocast computes in; None without autocast."""
    return engine.precision.autocast


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Dotted names of the default classes, used if the config lists none."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in DEFAULT_SAFE_MODULES]


def has_autocast_dtype(parameter: torch.Tensor) -> bool:
    """Whether the parameter's gradient is reduced in the lower precision."""
    return _find_mark(parameter) is not None


def _find_mark(parameter: torch.Tensor) -> torch.dtype | None:
    # At stages 1 and 2, the model may show the whole tensor of a marked shard.
    return next((dtype for each in list_alike(parameter) if (dtype := marked_dtype(each)) is not None), None)


has_comm_dtype = has_autocast_dtype


def get_comm_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which the parameter's gradient is reduced: the one that autocast set, or the parameter's own."""
    return _find_mark(parameter) or parameter.dtype


__getattr__ = _explain_names(__name__)
