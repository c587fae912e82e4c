"""`deepspeed.ops.op_builder`: the names of what DeepSpeed compiles, for programs that ask whether it can be had."""

from __future__ import annotations

from typing import ClassVar


class OpBuilder:
    """Something that DeepSpeed compiles. Here it is torch's, or missing: there is nothing to build."""

    NAME: ClassVar[str] = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether dsjob has it."""
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


class AsyncIOBuilder(OpBuilder):
    """Asynchronous files, for NVMe: not in dsjob."""

    NAME = "async_io"
