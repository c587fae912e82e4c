"""`deepspeed.ops.lion`: Lion with DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.deepspeed.defaults import fill_params
from dsjob.optim.lion import Lion


class _Lion(type):
    """Makes the Lion of a config an instance of both classes; DeepSpeedCPULion only where it steps on the host."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls.__name__ not in ("FusedLion", "DeepSpeedCPULion") or not isinstance(instance, Lion):
            return super().__instancecheck__(instance)
        placed = {p.device.type for group in instance.param_groups for p in group["params"]}
        return cls.__name__ == "FusedLion" or placed == {"cpu"}


class FusedLion(Lion, metaclass=_Lion):
    """Lion, with the arguments of `optimizer.params` for type Lion."""

    def __init__(self, params: Iterable[Any], **given: Any) -> None:
        super().__init__(params, **fill_params("optimizer", "Lion", given))


class DeepSpeedCPULion(FusedLion):
    """The same optimizer, under the name that DeepSpeed uses for state on the host."""


__path__ = _stand_for(__name__, "cpu_lion", "fused_lion")
__getattr__ = _explain_names(__name__)
