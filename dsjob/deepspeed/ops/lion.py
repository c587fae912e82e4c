"""`deepspeed.ops.lion`: Lion with DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.defaults import fill_params
from dsjob.optim.lion import Lion


class FusedLion(Lion):
    """Lion, with the arguments of `optimizer.params` for type Lion."""

    def __init__(self, params: Iterable[Any], **given: Any) -> None:
        super().__init__(params, **fill_params("optimizer", "Lion", given))


class DeepSpeedCPULion(FusedLion):
    """The same optimizer, under the name that DeepSpeed uses for state on the host."""


__getattr__ = _explain_names(__name__)
