"""`deepspeed.runtime.config`: a DeepSpeed config as a read-only object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch.distributed as dist

from dsjob.contract import schema as contract
from dsjob.contract.bounds import check_values
from dsjob.contract.check import check_shape
from dsjob.contract.paths import get_at
from dsjob.contract.rules import RULES
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.elasticity.elasticity import apply_elasticity, elasticity_enabled
from dsjob.deepspeed.settings import Settings
from dsjob.document.bare import complete_config, resolve_config
from dsjob.engine.configs import read_config
from dsjob.errors import ConfigError
from dsjob.ranks.mpu import read_data_ranks

DeepSpeedConfigError = ConfigError
ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """`log_level` of a config, or None: then the logger keeps its level."""
    return param_dict.get("log_level")


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """`gradient_clipping` of a config, or its default."""
    return cast(float, get_at(complete_config(param_dict), ("gradient_clipping",)))


class Section:
    """One section of a config, with its values as attributes. Unset values have their defaults, or None.

    The prefix `stage3_` of an attribute is optional. Raises ConfigError for invalid values.
    """

    path: tuple[str, ...] = ()
    parts: ClassVar[Mapping[str, type[Section]]] = {}

    def __init__(self, **given: Any) -> None:
        config: Any = given
        for name in reversed(self.path):
            config = {name: config}
        schema = contract.deepspeed_schema()
        found = check_values(config, "")
        found = found or [*check_shape(contract.prune(config, schema), schema), *RULES["finite"].find(config)]
        # A section that jobs do not have can be read all the same (`take_own`).
        wrong = [p for p in found if p.severity == "error" and (p.rule, tuple(p.path)) != ("unsupported", self.path)]
        if wrong:
            raise ConfigError(wrong)
        self._take(get_at(complete_config(config), self.path) or {})
        for key, part in self.parts.items():
            if given.get(key) == {}:
                setattr(self, key, part())

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Section:
        """A section with these values, which must be complete: nothing is checked or filled in."""
        section = cls.__new__(cls)
        section._take(values)
        return section

    def _take(self, values: Mapping[str, Any]) -> None:
        schema = contract.deepspeed_schema()
        for name in self.path:
            schema = schema["properties"][name]
        known = schema["properties"].items() if self.path else ()
        unset = {key: below.get("default") for key, below in known if "x-alias-of" not in below}
        for key, value in {**unset, **values}.items():
            part = self.parts.get(key, Section)
            setattr(self, key.removeprefix("stage3_"), part.of(value) if isinstance(value, Mapping) else value)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("stage3_"):
            return getattr(self, key.removeprefix("stage3_"))
        raise AttributeError(f"the config's section {'.'.join(self.path)} has no {key!r}")


class DeepSpeedConfig:
    """A complete config, from a dict or a file. Attributes: its top-level values, its sections, and the results of an
    engine's getters.

    Missing batch sizes are derived for the ranks of this job, or for the data-parallel ranks of `mpu`. Read-only.
    Raises ConfigError, UsageError.
    """

    def __init__(self, config: str | Mapping[str, Any] | os.PathLike[str], mpu: Any = None) -> None:
        self._param_dict, self._config, self._settings = *read_whole(config, mpu), Settings()
        self._settings.config = self._config

    def __getattr__(self, key: str) -> Any:
        if key.startswith(("__", "_config")):
            raise AttributeError(key)
        from dsjob.deepspeed.monitor.config import get_monitor_config
        from dsjob.deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        if key == "monitor_config":
            return get_monitor_config(self._param_dict)
        if key in ("zero_config", "zero_optimization_config"):
            return DeepSpeedZeroConfig.of(self._config["zero_optimization"])
        if key in self._config:
            value = self._config[key]
            return Section.of(value) if isinstance(value, Mapping) else value
        getter = getattr(self._settings, key)
        return getter() if callable(getter) else getter


def read_whole(config: str | Mapping[str, Any] | os.PathLike[str], mpu: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a config. Returns it as given, and with all defaults filled in. Raises ConfigError, UsageError."""
    given, _, origin = read_config(None, cast(str, config))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ranks = ranks if mpu is None else read_data_ranks(mpu)[1]
    settled, own = take_own(given, ranks)
    spec, _ = resolve_config(settled, world_size=ranks, locate=origin.locate)
    return given, {**complete_config(settled, spec), **own}


class _LayerDrop(Section):
    """`progressive_layer_drop`."""

    path = ("progressive_layer_drop",)


def take_own(config: Mapping[str, Any], ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a config into what an engine obeys everywhere, and what it only obeys under DeepSpeed's names: the keys
    log_level, elasticity and progressive_layer_drop. With elasticity, batch sizes for `ranks` take its place.

    Raises ConfigError, UsageError.
    """
    own = {key: config[key] for key in ("log_level",) if isinstance(config.get(key), str)}
    if elasticity_enabled(config):
        own["elasticity"] = config["elasticity"]
    drop = config.get("progressive_layer_drop")
    if isinstance(drop, Mapping) and drop.get("enabled") is True:
        own["progressive_layer_drop"] = vars(_LayerDrop(**drop))
    others = {key: value for key, value in config.items() if key not in own or key == "elasticity"}
    return apply_elasticity(others, ranks), own


__getattr__ = _explain_names(__name__)
