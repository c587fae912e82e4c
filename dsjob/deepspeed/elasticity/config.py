"""`deepspeed.elasticity.config`: the section `elasticity` of a config, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.errors import UsageError

LATEST = 0.2


class ElasticityError(UsageError):
    """Batch sizes cannot be chosen for a changing number of ranks."""


class ElasticityConfigError(ElasticityError):
    """The section `elasticity` is wrong, or contradicts the config."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818  # DeepSpeed's name
    """The number of ranks does not divide the batch that the section gives."""


class ElasticityConfig:
    """The section's values, with defaults. Raises ElasticityConfigError for missing and invalid ones."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        def number(key: str, default: int, least: int = 1) -> int:
            value = param_dict.get(key, default)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _wrong(key, f"must be an integer of at least {least}", value)
            return value

        self.enabled = bool(param_dict.get("enabled", False))
        for key in ("max_train_batch_size", "micro_batch_sizes") if self.enabled else ():
            if key not in param_dict:
                raise ElasticityConfigError(f"elasticity.{key} is missing")
        self.max_acceptable_batch_size = number("max_train_batch_size", 2000)
        micro = param_dict.get("micro_batch_sizes", [2, 4, 6])
        if not isinstance(micro, list) or not micro or not all(type(size) is int and size > 0 for size in micro):
            raise _wrong("micro_batch_sizes", "must be a list of positive integers", micro)
        self.micro_batches: list[int] = micro
        self.min_gpus, self.max_gpus = number("min_gpus", 1), number("max_gpus", 10_000)
        if self.max_gpus < self.min_gpus:
            raise _wrong("max_gpus", f"must not be below min_gpus ({self.min_gpus})", self.max_gpus)
        self.model_parallel_size = number("model_parallel_size", 1)
        self.num_gpus_per_node = number("num_gpus_per_node", 1)
        self.min_time = number("min_time", 0, least=0)
        try:
            self.version = float(param_dict.get("version", LATEST))
        except (TypeError, ValueError):
            raise _wrong("version", "must be 0.1 or 0.2", param_dict["version"]) from None
        if self.version not in (0.1, LATEST):
            raise _wrong("version", "must be 0.1 or 0.2", param_dict["version"])
        self.prefer_larger_batch_size = bool(param_dict.get("prefer_larger_batch", True))
        self.ignore_non_elastic_batch_info = bool(param_dict.get("ignore_non_elastic_batch_info", False))
        if self.version == 0.1 and self.model_parallel_size > 1:
            raise _wrong("model_parallel_size", "needs version 0.2", self.model_parallel_size)
        if self.num_gpus_per_node % self.model_parallel_size:
            text = f"must be a multiple of model_parallel_size ({self.model_parallel_size})"
            raise _wrong("num_gpus_per_node", text, self.num_gpus_per_node)


def _wrong(key: str, text: str, value: object) -> ElasticityConfigError:
    return ElasticityConfigError(f"elasticity.{key}: {text}, but is {value!r}")


__getattr__ = _explain_names(__name__)
