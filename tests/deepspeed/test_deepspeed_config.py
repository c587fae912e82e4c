"""DeepSpeed configs as the objects that programs for DeepSpeed read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsjob import ModelParallelUnit
from dsjob.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from dsjob.deepspeed.runtime.precision_config import DeepSpeedFP16Config, get_bfloat16_config
from dsjob.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from dsjob.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from dsjob.errors import ConfigError


def test_a_config_is_read_by_attributes(tmp_path: Path) -> None:
    body = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(body))
    for config in (DeepSpeedConfig(body), DeepSpeedConfig(file)):
        assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 4)
        assert config.bfloat16_enabled
        assert not config.fp16_enabled
        assert config.gradient_clipping == 1.0
        assert (config.zero_config.stage, config.fp16.loss_scale_window) == (0, 1000)
        assert not hasattr(config, "no_such_key")
    unit = SimpleNamespace(
        get_data_parallel_rank=int, get_data_parallel_world_size=lambda: 2, get_data_parallel_group=None
    )
    for mpu in (unit, ModelParallelUnit(0, 2)):
        assert DeepSpeedConfig(body, mpu).train_micro_batch_size_per_gpu == 2
    for wrong in ('{"train_batch_size": 8, "train_batch_size": 8}', '{"train_batch_size": 8, "fp61": {}}'):
        file.write_text(wrong)
        with pytest.raises(DeepSpeedConfigError, match=r"train_batch_size|fp61"):
            DeepSpeedConfig(file)


def test_sections_have_their_defaults_and_old_names() -> None:
    zero = DeepSpeedZeroConfig(stage=3, cpu_offload_param=True, stage3_max_reuse_distance=5)
    assert isinstance(zero.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert zero.offload_param.device == "cpu"
    assert zero.max_reuse_distance == zero.stage3_max_reuse_distance == 5
    assert (zero.overlap_comm, DeepSpeedZeroConfig(stage=2).overlap_comm) == (True, False)
    assert DeepSpeedZeroConfig(offload_param=None).offload_param is None
    assert isinstance(DeepSpeedZeroConfig(offload_optimizer={}).offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    with pytest.raises(ValueError, match="loss_scale_window"):
        DeepSpeedFP16Config(loss_scale_window=0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_scale_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="finite"):
        DeepSpeedFP16Config(enabled=True, loss_scale=value)
    with pytest.raises(ConfigError, match=r"finite|at least"):
        DeepSpeedConfig({"train_batch_size": 1, "fp16": {"enabled": True, "loss_scale": value}})
