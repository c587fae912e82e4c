"""`deepspeed.ops.op_builder`: DeepSpeed's builders of compiled ops, for programs that check their availability."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import ClassVar

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.errors import UsageError


class OpBuilder:
    """An op that DeepSpeed compiles. dsjob uses torch's counterpart or lacks the op, so there is nothing to build."""

    NAME: ClassVar[str] = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether dsjob supports the op."""
        from dsjob.deepspeed.ops import __compatible_ops__

        return __compatible_ops__.get(self.NAME, False)

    def load(self, verbose: bool = True) -> ModuleType:
        """Refused: there is no compiled module. Raises UsageError."""
        raise UsageError(
            f"dsjob has no compiled op {self.NAME or type(self).__name__}",
            hint="use the optimizers of deepspeed.ops, which need nothing to be built",
        )


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


__path__ = _stand_for(__name__, "builder")
__getattr__ = _explain_names(__name__)
