"""Where DeepSpeed's names are: under each of DeepSpeed's modules, they are the same objects."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import make_deepspeed_engine
from ranks import run_ranks

import dsjob.deepspeed as deepspeed
from dsjob import checkpointing, config
from dsjob.deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from dsjob.deepspeed.runtime.utils import move_to_device
from dsjob.deepspeed.runtime.zero.config import ZeroStageEnum
from dsjob.deepspeed.utils import groups
from dsjob.errors import UsageError
from dsjob.ranks.divide import divide_axes
from dsjob.ranks.mesh import World


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("ops.adam.cpu_adam", "DeepSpeedCPUAdam", "ops.adam"),
        ("ops.adam.fused_adam", "FusedAdam", "ops.adam"),
        ("ops.lion.fused_lion", "FusedLion", "ops.lion"),
        ("comm.comm", "init_distributed", "comm"),
        ("accelerator.real_accelerator", "get_accelerator", "accelerator"),
        ("utils.tensor_fragment", "safe_get_full_grad", "utils"),
        ("runtime.dataloader", "RepeatingLoader", "utils"),
        ("zero", "ZeroParamStatus", "runtime.zero"),
        ("zero", "partition_parameters", "runtime.zero"),
        ("runtime.zero", "MiCS_Init", "zero"),
        ("", "DeepSpeedConfig", "runtime.config"),
        ("", "log_dist", "utils"),
    ],
)
def test_a_name_is_the_same_in_each_of_its_homes(module: str, name: str, home: str) -> None:
    found, known = (importlib.import_module(f"dsjob.deepspeed.{each}".rstrip(".")) for each in (module, home))
    assert getattr(found, name) is getattr(known, name)


def test_a_module_that_stands_for_another_is_its_attribute() -> None:
    assert deepspeed.ops.adam.cpu_adam is deepspeed.ops.adam
    assert deepspeed.comm.comm.get_rank is dist.get_rank


def test_the_structs_of_a_config_are_where_the_manual_has_them() -> None:
    """deepspeed.config of DeepSpeed's manual: Config, BatchConfig, FP16Config, TrainingConfig."""
    for name in ("Config", "BatchConfig", "FP16Config", "BF16Config", "TorchAutocastConfig", "TrainingConfig"):
        assert getattr(deepspeed.config, name) is getattr(config, name)
    made = deepspeed.config.TrainingConfig(batch=deepspeed.config.BatchConfig(train_batch_size=8))
    assert made.batch.train_batch_size == 8
    with pytest.raises(AttributeError, match="AMPConfig"):
        _ = deepspeed.config.AMPConfig


def test_the_stages_have_names() -> None:
    assert make_deepspeed_engine(2).zero_optimization_stage() == ZeroStageEnum.gradients == 2


def test_tensors_move_with_what_holds_them() -> None:
    given = {"a": [torch.ones(2), torch.ones(3)], "b": "text"}
    moved = move_to_device(given, "meta", lambda tensor: tensor.numel() == 2)
    assert [each.device.type for each in moved["a"]] == ["meta", "cpu"]
    assert moved["b"] == "text"


def test_an_op_that_is_not_compiled_says_what_to_use() -> None:
    with pytest.raises(UsageError, match="dsjob has no compiled op cpu_adam\n  use the optimizers"):
        deepspeed.ops.op_builder.CPUAdamBuilder().load()


def test_the_accelerator_knows_memory_builders_and_variables() -> None:
    device = deepspeed.get_accelerator()
    assert 0 < device.available_memory() <= device.total_memory()
    assert device.memory_reserved() >= device.memory_allocated() >= 0
    assert isinstance(device.memory_stats(), dict)
    assert device.create_op_builder("CPUAdamBuilder").is_compatible()
    assert device.get_op_builder("EvoformerAttnBuilder") is None
    environment: dict[str, str] = {}
    device.set_visible_devices_envs(environment, [0, 2])
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,2"}
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing' in dsjob"):
        _ = device.no_such_thing


def _find_groups(world: World) -> list[list[int]]:
    checkpointing.use_ranks(divide_axes(world, context=2))
    grid: Any = PipelineParallelGrid(PipeDataParallelTopology(2, 1))
    found = (
        groups._get_sequence_parallel_group(),
        groups._get_data_parallel_group(),
        groups.get_tensor_model_parallel_group(),
        grid.get_pipe_parallel_group(),
        grid.get_model_parallel_group(),
    )
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, world.data_rank)
    return [deepspeed.comm.get_all_ranks_from_group(group) for group in found]


def test_a_rank_on_its_own_has_a_group_of_one() -> None:
    for rank, found in enumerate(run_ranks(_find_groups, 2)):
        assert found == [[0, 1], [rank], [rank], [0, 1], [rank]]
