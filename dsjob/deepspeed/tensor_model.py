"""`deepspeed.tp_model_init`, and what DeepSpeed's conventions mean for a model that ranks divide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dsjob.contract.deepspeed_keys import BATCH_KEYS
from dsjob.contract.model_ranks import read_tensor_size
from dsjob.contract.paths import get_at
from dsjob.engine.configs import Given
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World


class _Asked(NamedTuple):
    size: int
    dtype: torch.dtype | None


_asked: WeakKeyDictionary[nn.Module, _Asked] = WeakKeyDictionary()


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **given: Any
) -> nn.Module:
    """Makes `initialize` divide the layers of `model` among `tp_size` ranks. Returns the model, still whole, as
    DeepSpeed does.

    dtype: that of the config's precision; None leaves it open. config: has no effect, since `initialize` gets it too.
    Raises UsageError for other arguments: dsjob chooses the ranks itself.
    """
    if refused := next((name for name, value in given.items() if value is not None), None):
        raise UsageError(f"tp_model_init got {refused}, but dsjob divides the ranks itself", hint=f"omit {refused}")
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise UsageError(f"tp_model_init got tp_size={tp_size!r}", hint="pass the number of ranks, at least 1")
    _asked[model] = _Asked(tp_size, dtype)
    return model


def add_tensor_size(model: nn.Module, given: Given) -> Given:
    """The config of `initialize` with the size that `tp_model_init` was called with. Raises UsageError if they
    differ."""
    asked = _asked.get(model)
    if asked is None:
        return given
    size = read_tensor_size(given.config)
    if size not in (1, asked.size):
        raise UsageError(
            f"tp_model_init got tp_size={asked.size}, but tensor_parallel.autotp_size is {size}",
            hint="make both equal, or leave one of them out",
        )
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    computed = next((low[key] for key in low if get_at(given.config, (key, "enabled"), None) is True), None)
    if None not in (asked.dtype, computed) and asked.dtype != computed:
        message = f"Conflicting dtypes: tp_model_init got {asked.dtype}, but the config says {computed}"
        raise UsageError(message, hint="make both equal")
    section = given.config.get("tensor_parallel") or {}
    if size == asked.size and section:
        return given
    section = {**section, "autotp_size": asked.size}
    return replace(given, config={**given.config, "tensor_parallel": section})


def count_data_ranks(given: Given, world: World) -> Given:
    """The config of `initialize` with a `train_batch_size` that counts each sample once, if it has all three sizes.

    DeepSpeed's product of batch sizes has all ranks as a factor, also those that divide layers and so read the same
    samples. accelerate and Trainer write such a config.
    """
    if world.tensor.size == 1:
        return given
    train, micro, steps = (_read_size(given.config, key) for key in BATCH_KEYS)
    if not micro or not steps or train != micro * steps * world.everyone.size:
        return given
    return replace(given, config={**given.config, BATCH_KEYS[0]: micro * steps * world.data_size})


def _read_size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0
