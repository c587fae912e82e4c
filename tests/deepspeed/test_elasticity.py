"""`deepspeed.elasticity` chooses batches that many numbers of ranks divide, and engines train with them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
)
from dsjob.deepspeed.elasticity.elasticity import apply_elasticity


def _config(**section: Any) -> dict[str, Any]:
    return {"elasticity": {"enabled": True, "version": 0.1, **section}}


def test_the_batch_has_more_valid_numbers_of_ranks_than_any_other_candidate() -> None:
    config = _config(max_train_batch_size=100, micro_batch_sizes=[2, 3])
    # 2 x 48, 3 x 24 and 6 x 12 are the candidates; 96 = 2 x 48 = 3 x 32 divides by the most.
    assert compute_elastic_config(config, "0.19.6") == (96, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48])
    assert compute_elastic_config(config, "0.19.6", world_size=16) == (96, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48], 3)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="5 ranks"):
        compute_elastic_config(config, "0.19.6", world_size=5)


def test_version_2_counts_whole_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(max_train_batch_size=64, micro_batch_sizes=[2], version=0.2, num_gpus_per_node=4)
    batch, counts = compute_elastic_config(config, "0.19.6", world_size=8)[:2]
    assert (batch, counts) == (48, [4, 8, 12, 24])
    monkeypatch.setenv("WORLD_SIZE", "20")  # not valid: the largest batch for these ranks alone
    assert compute_elastic_config(config, "0.19.6") == (40, [20])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"enabled": False}, "does not enable elasticity"),
        ({"micro_batch_sizes": [2, 0]}, r"micro_batch_sizes: must be a list of positive integers, but is \[2, 0\]"),
        ({"min_gpus": 9, "max_gpus": 8}, r"max_gpus: must not be below min_gpus \(9\), but is 8"),
        ({"model_parallel_size": 2}, "needs version 0.2"),
        ({"version": 0.3}, "must be 0.1 or 0.2, but is 0.3"),
        ({"micro_batch_sizes": [65]}, "a micro batch of 65 exceeds the largest batch, 64"),
        ({"min_gpus": 40}, "no number of ranks from 40"),
    ],
)
def test_a_wrong_section_is_an_error(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ElasticityError, match=words):
        compute_elastic_config(_config(**{"max_train_batch_size": 64, "micro_batch_sizes": [2], **section}), "0.19.6")


def test_an_engine_trains_with_the_batch_of_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**_config(max_train_batch_size=10, micro_batch_sizes=[2, 3]), "optimizer": {"type": "Adam"}}
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config=config)[0]
    assert engine.get_batch_info() == (8, 2, 4)
    assert deepspeed.runtime.config.DeepSpeedConfig(config).train_batch_size == 8
    with pytest.raises(ElasticityConfigError, match="but the config also has train_batch_size"):
        deepspeed.initialize(model=nn.Linear(2, 1), config={**config, "train_batch_size": 6})
    planned = '{"enabled": true, "version": 0.1, "max_train_batch_size": 8, "micro_batch_sizes": [2, 3]}'
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", planned)
    with pytest.raises(ElasticityConfigError, match="max_acceptable_batch_size is 10"):
        deepspeed.initialize(model=nn.Linear(2, 1), config=config)


@pytest.mark.parametrize("planned", ["{", "[]"])
def test_a_plan_of_the_scheduler_that_cannot_be_read_is_an_error(planned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", planned)
    config = _config(max_train_batch_size=100, micro_batch_sizes=[2, 3])
    with pytest.raises(ElasticityConfigError, match="DEEPSPEED_ELASTICITY_CONFIG"):
        apply_elasticity(config, 2)
