"""DeepSpeed's getters for the config of an engine. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dsjob.compute.precision import Precision
from dsjob.contract.paths import get_at
from dsjob.contract.spec import EngineSpec
from dsjob.ranks.mesh import World


def _read(dotted: str) -> Callable[[Settings], Any]:
    """A method that returns the config's value at `dotted`, or its default if unset."""
    path = tuple(dotted.split("."))

    def get(self: Settings) -> Any:
        return get_at(self.config, path)

    get.__doc__ = f"`{dotted}` of the config."
    return get


def _is_on(dotted: str) -> Callable[[Settings], bool]:
    read = _read(dotted)

    def get(self: Settings) -> bool:
        return bool(read(self))

    get.__doc__ = f"Whether `{dotted}` of the config is on."
    return get


class Settings:
    """Getters for a complete DeepSpeed config (`config`) and for the position of this rank."""

    spec: EngineSpec
    world: World
    precision: Precision
    config: Mapping[str, Any]

    steps_per_print = _read("steps_per_print")
    log_level = _read("log_level")
    gradient_clipping = _read("gradient_clipping")
    gradient_predivide_factor = _read("gradient_predivide_factor")
    wall_clock_breakdown = _is_on("wall_clock_breakdown")
    memory_breakdown = _is_on("memory_breakdown")
    dump_state = _is_on("dump_state")
    sparse_gradients_enabled = _is_on("sparse_gradients")
    graph_harvesting = _is_on("graph_harvesting")
    dataloader_drop_last = _is_on("dataloader_drop_last")
    managed_gradient_accumulation = _is_on("managed_gradient_accumulation")
    zero_allow_untested_optimizer = _is_on("zero_allow_untested_optimizer")
    zero_force_ds_cpu_optimizer = _is_on("zero_force_ds_cpu_optimizer")

    fp16_enabled = _is_on("fp16.enabled")
    fp16_auto_cast = _is_on("fp16.auto_cast")
    fp16_master_weights_and_gradients = _is_on("fp16.fp16_master_weights_and_grads")
    bfloat16_enabled = _is_on("bf16.enabled")
    bf16_master_weights_and_gradients = _is_on("bf16.bf16_master_weights_and_grads")
    bf16_optimizer_states = _is_on("bf16.bf16_optimizer_states")
    amp_enabled = _is_on("amp.enabled")
    amp_params = _read("amp")
    torch_autocast_enabled = _is_on("torch_autocast.enabled")

    zero_reduce_scatter = _is_on("zero_optimization.reduce_scatter")
    zero_overlap_comm = _is_on("zero_optimization.overlap_comm")
    zero_offload_optimizer = _read("zero_optimization.offload_optimizer")
    zero_offload_param = _read("zero_optimization.offload_param")
    zero_sub_group_size = _read("zero_optimization.sub_group_size")
    zero_reduce_bucket_size = _read("zero_optimization.reduce_bucket_size")
    zero_multi_rank_bucket_allreduce = _is_on("zero_optimization.use_multi_rank_bucket_allreduce")
    zero_allgather_bucket_size = _read("zero_optimization.allgather_bucket_size")
    zero_allgather_partitions = _is_on("zero_optimization.allgather_partitions")
    zero_contiguous_gradients = _is_on("zero_optimization.contiguous_gradients")
    zero_load_from_fp32_weights = _is_on("zero_optimization.load_from_fp32_weights")
    zero_elastic_checkpoint = _is_on("zero_optimization.elastic_checkpoint")
    zero_max_live_parameters = _read("zero_optimization.stage3_max_live_parameters")
    zero_max_reuse_distance = _read("zero_optimization.stage3_max_reuse_distance")
    zero_prefetch_bucket_size = _read("zero_optimization.stage3_prefetch_bucket_size")
    zero_module_granularity_threshold = _read("zero_optimization.stage3_module_granularity_threshold")
    zero_param_persistence_threshold = _read("zero_optimization.stage3_param_persistence_threshold")
    zero_model_persistence_threshold = _read("zero_optimization.stage3_model_persistence_threshold")
    zero_gather_16bit_weights_on_model_save = _is_on("zero_optimization.stage3_gather_16bit_weights_on_model_save")
    zero_ignore_unused_parameters = _is_on("zero_optimization.ignore_unused_parameters")
    zero_legacy_stage1 = _is_on("zero_optimization.legacy_stage1")
    zero_round_robin_gradients = _is_on("zero_optimization.round_robin_gradients")
    zero_hpz_partition_size = _read("zero_optimization.zero_hpz_partition_size")
    zero_quantized_weights = _is_on("zero_optimization.zero_quantized_weights")
    zero_quantized_gradients = _is_on("zero_optimization.zero_quantized_gradients")
    mics_shard_size = _read("zero_optimization.mics_shard_size")
    is_sanity_checks_enabled = _is_on("zero_optimization.enable_sanity_checks")

    checkpoint_tag_validation = _read("checkpoint.tag_validation")
    load_universal_checkpoint = _is_on("checkpoint.load_universal")
    use_node_local_storage = _is_on("checkpoint.use_node_local_storage")
    flops_profiler_enabled = _is_on("flops_profiler.enabled")
    autotuning_enabled = _is_on("autotuning.enabled")
    elasticity_enabled = _is_on("elasticity.enabled")
    pld_enabled = _is_on("progressive_layer_drop.enabled")
    eigenvalue_enabled = _is_on("eigenvalue.enabled")
    data_efficiency_enabled = _is_on("data_efficiency.enabled")
    curriculum_enabled_legacy = _is_on("curriculum_learning.enabled")
    aio_config = _read("aio")

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage of the config."""
        return self.spec.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded while they are not in use."""
        return self.zero_optimization_stage() >= 3

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is on the host."""
        return bool(get_at(self.config, ("zero_optimization", "offload_optimizer", "device")) == "cpu")

    zero_use_cpu_optimizer = zero_cpu_offload

    def optimizer_name(self) -> str | None:
        """`optimizer.type` of the config; in lower case for DeepSpeed's own optimizers."""
        name = get_at(self.config, ("optimizer", "type"))
        own = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "onebitadam", "onebitlamb", "zerooneadam")
        return name.lower() if isinstance(name, str) and name.lower() in own else name

    def optimizer_params(self) -> Any:
        """`optimizer.params` of the config."""
        return get_at(self.config, ("optimizer", "params"))

    def scheduler_name(self) -> Any:
        """`scheduler.type` of the config."""
        return get_at(self.config, ("scheduler", "type"))

    def scheduler_params(self) -> Any:
        """`scheduler.params` of the config."""
        return get_at(self.config, ("scheduler", "params"))

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The lower precision that autocast computes in; None without autocast."""
        return self.precision.autocast

    def torch_autocast_lower_precision_safe_modules(self) -> list[str] | None:
        """Dotted names of the classes whose gradients are reduced in the lower precision; None: torch's linear and
        convolution layers."""
        safe = self.spec.torch_autocast.lower_precision_safe_modules
        return None if safe is None else list(safe)

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after they are reduced."""
        return not get_at(self.config, ("prescale_gradients",))

    def initial_dynamic_scale(self) -> float:
        """The initial value of a dynamic loss scale."""
        return float(2**self.spec.fp16.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The arguments of DeepSpeed's dynamic loss scaler."""
        fp16 = self.spec.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the forward pass, and the dtype in which gradients are reduced."""
        return self.precision.compute, self.precision.reduce

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self.precision.reduce

    def autotp_size(self) -> int:
        """The ranks among which layers are divided; 0 if the config does not say."""
        section = self.spec.tensor_parallel
        return section.ranks if section.autotp_size or section.size > 1 else 0

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return self.world.local_rank

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks: all ranks, unless an mpu divides them."""
        return self.world.data_size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The process group of the data-parallel ranks; None if no process group exists."""
        return self.world.data_group or (dist.group.WORLD if dist.is_initialized() else None)

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that one copy of the model is split over; 1 without an mpu."""
        return self.world.model.size
