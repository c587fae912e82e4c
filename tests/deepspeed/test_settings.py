"""What a DeepSpeedEngine says of its config, and of what it has counted."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from engines import ADAMW, build_net, make_deepspeed_engine, make_tokens
from ranks import run_ranks

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.settings import Settings
from dsjob.document.bare import complete_config
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World


def test_getters_give_values_and_defaults_of_the_config() -> None:
    engine = make_deepspeed_engine(2, accumulation=3, gradient_clipping=0.5, steps_per_print=7, fp16={"enabled": False})
    assert engine.gradient_clipping() == 0.5
    assert engine.steps_per_print() == 7
    assert engine.fp16_enabled() is engine.bfloat16_enabled() is engine.amp_enabled() is False
    assert engine.zero_optimization() is engine.zero_optimization_partition_gradients() is True
    assert engine.zero_optimization_partition_weights() is False
    assert engine.zero_reduce_bucket_size() == 500_000_000
    assert engine.zero_allgather_partitions() is True
    assert engine.zero_cpu_offload() is False
    assert engine.checkpoint_tag_validation() == "Warn"
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", None)
    assert engine.optimizer_params()["lr"] == 0.01
    assert engine.postscale_gradients() is True
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size, engine.global_rank) == (1, 1, 1, 0)
    assert engine.get_batch_info() == (6, 2, 3)
    assert engine.dynamic_loss_scale_args()["init_scale"] == engine.initial_dynamic_scale() == 2**16


CHANGED: dict[str, Any] = {  # every key that a getter reads has a value other than its default, here or in BF16
    "train_batch_size": 4, "steps_per_print": 7, "gradient_clipping": 0.5, "gradient_predivide_factor": 2.0,
    "prescale_gradients": True, "wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True,
    "dataloader_drop_last": True, "managed_gradient_accumulation": False, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "log_level": "ERROR",
    "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "fp16": {"enabled": True, "auto_cast": True, "fp16_master_weights_and_grads": True},
    "checkpoint": {"load_universal": True, "use_node_local_storage": True},
    **{key: {"enabled": True} for key in ("autotuning", "data_efficiency", "flops_profiler")},
    "zero_optimization": {
        "stage": 2, "reduce_scatter": False, "overlap_comm": True, "sub_group_size": 11, "reduce_bucket_size": 12,
        "use_multi_rank_bucket_allreduce": False, "allgather_bucket_size": 13, "allgather_partitions": False,
        "contiguous_gradients": False, "load_from_fp32_weights": False, "elastic_checkpoint": True,
        "stage3_max_live_parameters": 14, "stage3_max_reuse_distance": 15, "stage3_prefetch_bucket_size": 16,
        "stage3_module_granularity_threshold": 17, "stage3_param_persistence_threshold": 18,
        "stage3_model_persistence_threshold": 19, "stage3_gather_16bit_weights_on_model_save": True,
        "ignore_unused_parameters": False, "legacy_stage1": True, "round_robin_gradients": True,
        "zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True,
        "enable_sanity_checks": True, "offload_optimizer": {"device": "cpu"},
    },
}  # fmt: skip
BF16: dict[str, Any] = {
    "train_batch_size": 4,
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
# What DeepSpeed's engine no longer has: keys, most of which its config refuses, and what the getters give of them.
REMOVED: dict[str, Any] = {
    "sparse_gradients": True, "graph_harvesting": True, "zero_optimization": {"mics_shard_size": 3},
    "checkpoint": {"tag_validation": "Ignore"}, "elasticity": {"enabled": True},
    **{key: {"enabled": True} for key in ("progressive_layer_drop", "eigenvalue", "curriculum_learning")},
}  # fmt: skip
ONLY_HERE = {
    "sparse_gradients_enabled": True, "graph_harvesting": True, "mics_shard_size": 3, "amp_enabled": False,
    "checkpoint_tag_validation": "Ignore", "elasticity_enabled": True, "pld_enabled": True, "eigenvalue_enabled": True,
    "curriculum_enabled_legacy": True,
}  # fmt: skip
SECTIONS = {"amp_params", "aio_config", "zero_offload_optimizer", "zero_offload_param"}  # DeepSpeed's are objects


def list_getters() -> list[str]:
    """Those that read a key of the config, and nothing else."""
    made = ("_read.", "_is_on.")
    return [name for name, value in vars(Settings).items() if getattr(value, "__qualname__", "").startswith(made)]


def read_both(world: World, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the getters say of a config, and what those of DeepSpeed's engine say that have the same name."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    settings, engine = Settings(), DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    settings.config, engine._config = complete_config(config), DeepSpeedConfig(config)
    names = list_getters()
    theirs = {name: getattr(engine, name)() for name in names if name not in {*ONLY_HERE, *SECTIONS}}
    return {name: getattr(settings, name)() for name in names}, theirs


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install '.[deepspeed]'")
def test_getters_give_what_deepspeeds_give() -> None:
    seen: dict[str, list[Any]] = {}
    for config in ({"train_batch_size": 4}, CHANGED, BF16):
        ours, theirs = run_ranks(read_both, 1, config)[0]
        assert len(theirs) > 40
        assert {name: ours[name] for name in theirs} == theirs
        assert (ours["zero_offload_optimizer"] or {}).get("device") == (None if len(config) == 1 else "cpu")
        for name, value in ours.items():
            seen.setdefault(name, []).append(value)
    constant = {name for name, values in seen.items() if all(value == values[0] for value in values)}
    assert constant == {*ONLY_HERE, *SECTIONS} - {"zero_offload_optimizer"}


def test_getters_of_what_deepspeed_has_removed() -> None:
    settings = Settings()
    settings.config = complete_config(REMOVED)
    assert {name: getattr(settings, name)() for name in ONLY_HERE} == ONLY_HERE
    assert settings.amp_params()["enabled"] is False
    assert settings.aio_config()["queue_depth"] == 8
    assert settings.zero_offload_param() is None


def test_old_spellings_and_auto_are_seen_resolved() -> None:
    config = {"train_batch_size": 4, "optimizer": ADAMW, "bfloat16": {"enabled": True}, "gradient_clipping": "auto"}
    engine = deepspeed.initialize(model=build_net(), config=config)[0]
    assert engine.bfloat16_enabled() is True
    assert engine.gradient_clipping() == 1.0


def test_batch_sizes_can_be_changed_while_training() -> None:
    engine = make_deepspeed_engine(0, accumulation=3)
    x, y = make_tokens(0, 2)

    def step() -> int:
        count = 0
        while True:
            engine.backward(engine(x, y))
            engine.step()
            count += 1
            if engine.was_step_applied():
                return count

    assert step() == 3
    engine.set_train_batch_size(4)
    assert (step(), engine.gradient_accumulation_steps(), engine.global_samples) == (2, 2, 10)
    engine.set_train_micro_batch_size(5)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (10, 5)
    with pytest.raises(UsageError, match="a train batch of 7 is not a multiple of micro batch 5 x 1 ranks"):
        engine.set_train_batch_size(7)


def test_rates_and_momenta_are_read_and_set() -> None:
    engine = make_deepspeed_engine(0)
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5]
    assert engine.get_mom() == [(0.9, 0.95)]
    assert engine.get_type() == [0.0]
    sgd = make_deepspeed_engine(0, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8}})
    assert sgd.get_mom() == [0.8]


def test_what_programs_ask_of_an_engine_besides() -> None:
    make = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)  # noqa: E731
    config = {"train_batch_size": 2, "optimizer": ADAMW}
    engine = deepspeed.initialize(model=build_net(), config=config, lr_scheduler=make)[0]
    assert engine.client_lr_scheduler is make
    assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.ConstantLR)
    assert make_deepspeed_engine(0).client_lr_scheduler is None
    assert engine.monitor.enabled is False
    assert engine.get_wall_clock_timers() == {}
    engine.monitor.write_events([("Train/loss", 1.0, 0)])
    assert engine.is_compiled is False
    assert make_deepspeed_engine(0, compile={"enabled": True, "backend": "eager"}).is_compiled is True
    engine.compile(backend="eager")
    assert engine.is_compiled is True
    with pytest.raises(AttributeError, match="neither DeepSpeedEngine nor its model Net has an attribute 'nothing'"):
        _ = engine.nothing


def test_a_mesh_of_ranks_is_one_of_data_parallel_ranks() -> None:
    config = {"train_batch_size": 2, "optimizer": ADAMW}
    assert deepspeed.initialize(model=build_net(), config=config, mesh_param=(1, 1))[0].world_size == 1
    with pytest.raises(UsageError, match=r"mesh_param=\(1, 2\)"):
        deepspeed.initialize(model=build_net(), config=config, mesh_param=(1, 2))
