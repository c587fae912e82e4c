"""`deepspeed.runtime.lr_schedules`: the five schedules with DeepSpeed's defaults, and the names of their arguments.

`isinstance` with these classes also recognizes the schedules that a config creates.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from dsjob.contract import schema as contract
from dsjob.contract.check import check_config
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.defaults import fill_params
from dsjob.errors import ConfigError
from dsjob.optim import schedules

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
_PARAMS = ("scheduler", "params")
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"


class _Named(type):
    """Metaclass of DeepSpeed's names. Calling such a class fills in DeepSpeed's defaults and returns dsjob's schedule,
    whose type is another class; hence `__instancecheck__`."""

    def __call__(cls, optimizer: Optimizer, *unnamed: Any, **given: Any) -> Any:
        kind = getattr(schedules, cls.__name__)
        known = _list_arguments(cls.__name__)
        given = {**dict(zip(known, unnamed, strict=False)), **given}
        # Programs may pass None for an argument without a default: treat it as not given.
        given = {key: value for key, value in given.items() if value is not None or "default" in known.get(key, {})}
        problems = check_config({"scheduler": {"type": cls.__name__, "params": given}})
        wrong = [problem for problem in problems if problem.severity == "error" and problem.path[:2] == _PARAMS]
        if wrong:
            raise ConfigError(wrong)
        filled = fill_params("scheduler", cls.__name__, given)
        return kind(optimizer, **filled)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, getattr(schedules, cls.__name__))


def _list_arguments(kind: str) -> dict[str, Any]:
    section = contract.deepspeed_schema()["properties"]["scheduler"]
    properties: dict[str, Any] = (contract.params_schema(section, kind) or {}).get("properties", {})
    return properties


class LRRangeTest(metaclass=_Named):
    """See dsjob.optim.schedules."""


class OneCycle(metaclass=_Named):
    """See dsjob.optim.schedules."""


class WarmupLR(metaclass=_Named):
    """See dsjob.optim.schedules."""


class WarmupDecayLR(metaclass=_Named):
    """See dsjob.optim.schedules."""


class WarmupCosineLR(metaclass=_Named):
    """See dsjob.optim.schedules."""


def _find_constant(name: str) -> str:
    """DeepSpeed has a constant for each argument: CYCLE_MIN_LR is "cycle_min_lr", and so on."""
    if name.isupper() and any(name.lower() in _list_arguments(kind) for kind in VALID_LR_SCHEDULES):
        return name.lower()
    raise AttributeError(name)


__getattr__ = _explain_names(__name__, _find_constant)
