"""`deepspeed.elasticity.elasticity`: chooses a global batch size that as many numbers of ranks as possible divide.

A batch is a micro batch, or the least common multiple of all, times the largest highly composite number that fits:
such a number has more divisors than any smaller one. The results are DeepSpeed's.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect
from collections.abc import Iterable, Mapping
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from dsjob.deepspeed.utils import logger

# https://oeis.org/A002182, as far as DeepSpeed uses them.
_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
_OLDEST = (0, 3, 8)  # the DeepSpeed that first had the section
_SCHEDULER = "DEEPSPEED_ELASTICITY_CONFIG"
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a config has the section `elasticity`, with `enabled`."""
    section = ds_config.get("elasticity")
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The train batch, and the numbers of data-parallel ranks that divide it into micro batches.

    With `world_size` data-parallel ranks, or `return_microbatch`, also the largest micro batch for them. Version 0.2 of
    the section counts whole nodes, and takes the number of ranks from WORLD_SIZE if `world_size` is 0. Raises
    ElasticityError.
    """
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("the config does not enable elasticity", hint="set elasticity.enabled to true")
    target = tuple(int(part) for part in target_deepspeed_version.split("+")[0].split(".")[:3] if part.isdigit())
    if target < _OLDEST:
        raise ElasticityError(f"DeepSpeed {target_deepspeed_version} has no elasticity; 0.3.8 is the first that has it")
    batch, counts, micro = _compute(ElasticityConfig(ds_config["elasticity"]), world_size)
    if not world_size and not return_microbatch:
        return batch, counts
    if micro is None:
        raise ElasticityError(f"no micro batch of the section divides {batch} samples on {world_size} ranks")
    return batch, counts, micro


def _compute(config: ElasticityConfig, world_size: int) -> tuple[int, list[int], int | None]:
    """The batch, the valid numbers of ranks, and the largest micro batch for `world_size`, or else WORLD_SIZE."""
    ranks = world_size
    if config.version == 0.1:
        batch, counts = _choose(config, config.max_acceptable_batch_size, config.min_gpus, config.max_gpus)
    else:
        ranks = world_size or _read_world_size()
        batch, counts = _choose_by_node(config, ranks)
    if world_size and world_size not in counts:
        raise ElasticityIncompatibleWorldSize(f"{world_size} ranks are not among those that are valid: {counts}")
    fitting = [size for size in config.micro_batches if ranks and batch // ranks % size == 0]
    return batch, counts, max(fitting, default=None)


def apply_elasticity(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """A config with the batch sizes that its section `elasticity` gives for `ranks`, instead of the section.

    Raises ElasticityError.
    """
    if not elasticity_enabled(config):
        return config
    section = ElasticityConfig(config["elasticity"])
    _match_scheduler(section)
    batch, _, micro = _compute(section, ranks)
    given = [key for key in _SIZES if key in config]
    if given and not section.ignore_non_elastic_batch_info:
        raise ElasticityConfigError(
            f"elasticity chooses the batch sizes, but the config also has {', '.join(given)}",
            hint="remove them, or set elasticity.ignore_non_elastic_batch_info",
        )
    if micro is None:
        raise ElasticityError(f"no micro batch of {section.micro_batches} divides {batch} samples on {ranks} ranks")
    logger.info("elasticity: train batch %d, micro batch %d on %d ranks", batch, micro, ranks)
    others = {key: value for key, value in config.items() if key not in (*_SIZES, "elasticity")}
    return {**others, "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}


def _choose(config: ElasticityConfig, most: int, least_ranks: int, most_ranks: int) -> tuple[int, list[int]]:
    """The batch with the most valid numbers of ranks, and these."""
    micro = config.micro_batches
    if max(micro) > most:
        raise ElasticityConfigError(f"elasticity: a micro batch of {max(micro)} exceeds the largest batch, {most}")
    bases = {base for base in (*micro, math.lcm(*micro)) if base <= most}
    batches = {base * _COMPOSITE[bisect(_COMPOSITE, most // base) - 1] for base in bases}
    found = {
        batch: sorted(
            {
                count
                for size in micro
                if batch % size == 0
                for count in _find_divisors(batch // size)
                if least_ranks <= count <= most_ranks
            }
        )
        for batch in batches
    }
    sign = 1 if config.prefer_larger_batch_size else -1
    batch = max(found, key=lambda batch: (len(found[batch]), sign * batch))
    if not found[batch]:
        raise ElasticityError(f"no number of ranks from {least_ranks} to {most_ranks} divides a batch of up to {most}")
    return batch, found[batch]


def _choose_by_node(config: ElasticityConfig, ranks: int) -> tuple[int, list[int]]:
    """The same for whole nodes, on which the ranks of one model are together."""
    node = config.num_gpus_per_node
    parts, most = node // config.model_parallel_size, config.max_acceptable_batch_size
    batch, nodes = _choose(config, most // parts, max(config.min_gpus // node, 1), max(config.max_gpus // node, 1))
    counts = [count * parts for count in nodes]
    if ranks // config.model_parallel_size in counts:
        return batch * parts, counts
    now = ranks * parts // node
    choices = [most // (size * now) * size * now for size in config.micro_batches if now]
    if not choices or not max(choices):
        raise ElasticityError(f"{ranks} ranks are too many or too few for batches of up to {most}")
    return max(choices) if config.prefer_larger_batch_size else min(filter(None, choices)), [now]


def _find_divisors(number: int) -> Iterable[int]:
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return {*small, *(number // count for count in small)}


def _read_world_size() -> int:
    given = os.environ.get("WORLD_SIZE", "")
    if not given.isnumeric():
        raise ElasticityConfigError("version 0.2 needs the number of ranks", hint="pass world_size, or set WORLD_SIZE")
    return int(given)


def _match_scheduler(section: ElasticityConfig) -> None:
    """Raises ElasticityConfigError if the scheduler has planned with another section, which it leaves in a variable."""
    if _SCHEDULER not in os.environ:
        return
    try:
        given = json.loads(os.environ[_SCHEDULER])
    except ValueError as error:
        raise ElasticityConfigError(f"the variable {_SCHEDULER} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ElasticityConfigError(f"the variable {_SCHEDULER} must be a JSON object, but is {given!r}")
    planned = ElasticityConfig(given)
    for name in ("max_acceptable_batch_size", "micro_batches", "version"):
        if getattr(planned, name) != getattr(section, name):
            raise ElasticityConfigError(
                f"elasticity: {name} is {getattr(section, name)}, but {_SCHEDULER} has {getattr(planned, name)}"
            )


__getattr__ = _explain_names(__name__)
