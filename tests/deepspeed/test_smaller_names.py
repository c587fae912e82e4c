"""Small functions and classes of DeepSpeed that programs call beside the engine."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engines import make_deepspeed_engine
from ranks import run_ranks
from torch import nn

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.compression.helper import recursive_getattr, recursive_setattr
from dsjob.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from dsjob.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from dsjob.deepspeed.runtime.utils import PartitionedTensor, call_to_str, prefix_sum_inc, set_random_seed
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World


def _divide(world: World, rows: int) -> bool:
    group = dist.group.WORLD
    assert group is not None
    whole = torch.arange(rows * 3.0).view(rows, 3)
    part = PartitionedTensor(whole, group)
    assert part.local_size() == part.data().shape
    summed = torch.full((2,), 1.0 + world.everyone.rank)
    deepspeed.comm.inference_all_reduce(summed)
    assert summed.tolist() == [3.0, 3.0]
    again = PartitionedTensor.from_meta(part.to_meta(), part.local_data, group)
    return torch.equal(part.full(), whole) and torch.equal(again.full(), whole)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_partitioned_tensor_is_whole_again(rows: int) -> None:
    assert run_ranks(_divide, 2, rows) == [True, True]


def test_a_seed_is_for_all_generators() -> None:
    drawn = []
    for _ in range(2):
        set_random_seed(7)
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


def test_texts_and_sums() -> None:
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert call_to_str("f") == "f()"
    assert call_to_str("f", 1, "a", key=None) == "f(1, 'a', key=None)"


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float16), ("cpu", torch.bfloat16)])
def test_a_model_is_built_on_a_device(device: str, dtype: torch.dtype) -> None:
    with deepspeed.OnDevice(dtype=dtype, device=device):
        weight = nn.Linear(2, 2).weight
    assert (weight.device.type, weight.dtype) == (device, dtype)
    with deepspeed.OnDevice(dtype=dtype, device=device, enabled=False):
        weight = nn.Linear(2, 2).weight
    assert (weight.device.type, weight.dtype) == ("cpu", torch.float32)


@pytest.mark.parametrize(("kind", "decoupled"), [("Adam", True), ("AdamW", True), ("Lion", None)])
def test_the_optimizer_of_a_config_is_an_instance_of_deepspeeds_classes(kind: str, decoupled: bool | None) -> None:
    optimizer: Any = make_deepspeed_engine(0, net=nn.Linear(4, 1), optimizer={"type": kind}).optimizer
    ours, others = [(FusedAdam, DeepSpeedCPUAdam), (FusedLion, DeepSpeedCPULion)][:: 1 if "Adam" in kind else -1]
    assert all(isinstance(optimizer, each) for each in ours)
    assert not any(isinstance(optimizer, each) for each in others)
    assert getattr(optimizer, "adam_w_mode", None) is decoupled
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.empty(2, device="meta"))]
    assert [isinstance(optimizer, each) for each in ours] == [True, False]


def test_the_config_sets_the_level_of_the_logger() -> None:
    from dsjob.deepspeed.utils.logging import logger, set_log_level_from_string

    before = logger.level
    try:
        engine = make_deepspeed_engine(0, net=nn.Linear(4, 1), log_level="ERROR")
        assert (engine.log_level(), logger.level) == ("ERROR", logging.ERROR)
        assert make_deepspeed_engine(0, net=nn.Linear(4, 1)).log_level() is None
        assert logger.level == logging.ERROR
        with pytest.raises(UsageError, match="unknown log level 'loud'"):
            set_log_level_from_string("loud")
    finally:
        logger.setLevel(before)


def test_a_part_of_a_model_is_read_and_replaced_by_its_name() -> None:
    """DeepSpeed-Chat puts its adapters into a model this way."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.ReLU())
    assert recursive_getattr(model, "0.0") is model[0][0]
    recursive_setattr(model, "0.0", nn.Linear(2, 5))
    recursive_setattr(model, "1", nn.Tanh())
    assert model[0][0].out_features == 5
    assert isinstance(model[1], nn.Tanh)


def test_an_engine_counts_epochs_and_measures_samples_per_second() -> None:
    """DeepSpeed-Chat calls update_epoch_count after each epoch."""
    engine, timer = (found := make_deepspeed_engine(0, net=nn.Linear(4, 1))), found.tput_timer
    assert timer.avg_samples_per_sec() < 0  # nothing counted yet
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    assert timer.global_step_count == 4
    assert timer.avg_samples_per_sec() == pytest.approx(2 * engine.train_batch_size() / timer.total_elapsed_time)
    engine.eval()
    engine(torch.ones(2, 4))  # evaluation does not start the clock
    timer.stop(global_step=True)
    assert (timer.global_step_count, timer.micro_step_count) == (4, 4)
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)
