"""`deepspeed.ops.op_builder`: DeepSpeed's builders of compiled ops, for programs that check their availability."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import ClassVar

from dsjob.deepspeed.absent import explain_names as _explain_names


class OpBuilder:
    """An op that DeepSpeed compiles. dsjob uses torch's counterpart or lacks the op, so there is nothing to build."""

    NAME: ClassVar[str] = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether dsjob supports the op."""
        from dsjob.deepspeed.ops import __compatible_ops__

        return __compatible_ops__.get(self.NAME, False)


class FusedAdamBuilder(OpBuilder):
    """Adam."""

    NAME = "fused_adam"


class CPUAdamBuilder(OpBuilder):
    """Adam on the host."""

    NAME = "cpu_adam"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the host."""

    NAME = "cpu_adagrad"


class FusedLambBuilder(OpBuilder):
    """LAMB."""

    NAME = "fused_lamb"


class FusedLionBuilder(OpBuilder):
    """Lion."""

    NAME = "fused_lion"


class CPULionBuilder(OpBuilder):
    """Lion on the host."""

    NAME = "cpu_lion"


class TransformerBuilder(OpBuilder):
    """The transformer layer."""

    NAME = "transformer"


class StochasticTransformerBuilder(OpBuilder):
    """The same layer with `stochastic_mode`, which has no effect here."""

    NAME = "stochastic_transformer"


class AsyncIOBuilder(OpBuilder):
    """Asynchronous file I/O; dsjob's own needs nothing to be built."""

    NAME = "async_io"

    def load(self, verbose: bool = True) -> ModuleType:
        """A module with `aio_handle`."""
        return import_module("dsjob.deepspeed.ops.aio")


class PinMemoryBuilder(AsyncIOBuilder):
    """Page-locked memory: `load` returns a module with `pin_handle`."""

    NAME = "pin_memory"


__getattr__ = _explain_names(__name__)
