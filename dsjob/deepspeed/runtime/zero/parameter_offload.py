"""`deepspeed.runtime.zero.parameter_offload`: what programs switch off before they generate with a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.parallel.zero import GatheredParameters


class _NoParameters(nn.Module):
    """A module whose parameters no hook has gathered."""

    def ds_external_parameters(self) -> tuple[()]:
        """No parameters."""
        return ()


class DeepSpeedZeRoOffload:
    """DeepSpeed's hooks that gather parameters, as an attribute of the optimizer at stage 3. dsjob has none of them.

    TRL and programs like it remove these hooks inside `GatheredParameters`, generate, and register them again. Here,
    they may do so without effect: forward passes gather by themselves, and work inside `GatheredParameters` too.
    """

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Has no effect."""


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """A context in which an engine's parameters are whole. Yields the engine. Every rank must enter and leave it."""
    with GatheredParameters(model.parameters()):
        yield model


__getattr__ = _explain_names(__name__)
