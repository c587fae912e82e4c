"""The test files of DeepSpeed to run, and the known reasons of failures."""

from __future__ import annotations

import re
from typing import Any

FILES = (
    "checkpoint/test_convert_checkpoint.py",
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_mics_optimizer.py",
    "checkpoint/test_other_optimizer.py",
    "checkpoint/test_pipeline.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_sparse.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_universal_checkpoint.py",
    "checkpoint/test_zero_optimizer.py",
    "comm/test_dist.py",
    "elasticity/test_elastic.py",
    "launcher/test_ds_arguments.py",
    "model_parallelism/test_autotp_training.py",
    "monitor/test_monitor.py",
    "ops/adagrad/test_cpu_adagrad.py",
    "ops/adam/test_adamw.py",
    "ops/adam/test_cpu_adam.py",
    "ops/adam/test_hybrid_adam.py",
    "ops/lion/test_cpu_lion.py",
    "ops/lion/test_lion.py",
    "ops/muon/test_muon.py",
    "ops/muon/test_muon_partial_training.py",
    "pipe/test_pipe_module.py",
    "profiling/flops_profiler/test_flops_profiler.py",
    "runtime/test_autocast.py",
    "runtime/test_data.py",
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_config_model.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_lr_schedulers.py",
    "runtime/test_multi_output_model.py",
    "runtime/test_multiple_models.py",
    "runtime/test_mup_optimizers.py",
    "runtime/test_no_sync_ctxt.py",
    "runtime/test_pld.py",
    "runtime/test_precision_config_dynamic_scale.py",
    "runtime/test_precision_config_loss_scale.py",
    "runtime/test_runtime_utils.py",
    "runtime/activation_checkpointing/test_activation_checkpointing.py",
    "runtime/activation_checkpointing/test_activation_checkpointing_non_reentrant.py",
    "runtime/half_precision/test_dynamic_loss_scale.py",
    "runtime/half_precision/test_fp16.py",
    "runtime/half_precision/test_zero_optim_overflow.py",
    "runtime/half_precision/onebit/test_onebit.py",
    "runtime/pipe/test_pipe.py",
    "runtime/pipe/test_pipe_schedule.py",
    "runtime/pipe/test_topology.py",
    "runtime/sparse_tensor/test_averaging_sparse_gradients.py",
    "runtime/sparse_tensor/test_csr.py",
    "runtime/sparse_tensor/test_sparse_grads.py",
    "runtime/utils/test_partition.py",
    "runtime/zero/test_ignore_unused_parameters.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_allreduce_fetch_params.py",
    "runtime/zero/test_zero_autocast_mixed_dtype.py",
    "runtime/zero/test_zero_config.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_ancestry.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_dynamic_class.py",
    "runtime/zero/test_zero_grad_clip.py",
    "runtime/zero/test_zero_hook_attribute_delegation.py",
    "runtime/zero/test_zero_late_module_attach.py",
    "runtime/zero/test_zero_leaf_module.py",
    "runtime/zero/test_zero_linear_direct_init.py",
    "runtime/zero/test_zero_nesting_init.py",
    "runtime/zero/test_zero_offloadpp.py",
    "runtime/zero/test_zero_tensor_fragment.py",
    "runtime/zero/test_zero_tiled.py",
    "runtime/zero/test_zeropp.py",
    "utils/test_groups.py",
    "utils/test_init_on_device.py",
    "utils/test_partition_balanced.py",
    "v1/test_engine_log_level.py",
    "v1/half_precision/test_bf16.py",
    "v1/half_precision/test_gradient_clipping_default.py",
    "v1/half_precision/test_mixed_precision_dtype.py",
    "v1/half_precision/test_with_autocast.py",
    "v1/nvme/test_aio.py",
    "v1/nvme/test_pinned_manager.py",
    "v1/zero/test_offload_states.py",
    "v1/zero/test_overlap_comm_record_stream.py",
    "v1/zero/test_stage2_flatten_on_gpu.py",
    "v1/zero/test_zero.py",
    "v1/zero/test_zero2_offload_multi_backward.py",
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py",
    "v1/zero/test_zero_autocast.py",
    "v1/zero/test_zero_coalesce_grad_reduction.py",
    "v1/zero/test_zero_cpu_offload_grad_accum.py",
    "v1/zero/test_zero_functorch_linear.py",
    "v1/zero/test_zero_hook_count_regression.py",
    "v1/zero/test_zero_init_pg_contradiction.py",
    "v1/zero/test_zero_torch_func.py",
    "v1/zero/test_zero_user_backward.py",
)

# Their tests start process groups themselves, so they need new processes.
FRESH = ("comm/test_dist.py",)

# Their configs misspell a key, which is an error; these run as with `dsjob exec --lenient`.
LENIENT = ("runtime/half_precision/onebit/test_onebit.py", "runtime/pipe/test_pipe.py")

# The first pattern that an error, or the end of its trace, has gives the reason.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("not in dsjob", r"dsjob has no deepspeed\.(moe|pipe|runtime\.(pipe|progressive_layer_drop))"),
    ("not in dsjob", r"compression_training\.|sparse_tensor_module_names|SparseCPU"),
    ("not in dsjob", r"is_current_accelerator_supported|has no attribute 'pipeline_parallelism'"),
    ("the optimizer's state is sharded", r"c10d\.allgather_|Cannot flatten unevenly sharded"),
    ("not in dsjob", r"Data inconsistency within the TP group"),
    ("internals", r"noly rank0 should have the state_dict"),
    ("refused here", r"which do not divide among"),
    ("not in dsjob", r"dsjob has no deepspeed\.(utils\.numa|runtime\.sparse_tensor)|grad, averaged_grads"),
    ("internals", r"LOG_LEVEL_DEFAULT is None|GRADIENT_CLIPPING_DEFAULT|_is_checkpointable|no 'experiment'"),
    ("internals", r"Flattening param group"),
    ("the last bit of exp", r"expected_theta == actual_theta"),
    ("internals", r"'CPUAdamBuilder' object has no|'monitor_config'|_is_grid_valid|_precompute_checkpointable"),
    ("internals", r"'activation_checkpoint_func'"),
    ("internals", r"param has autocast_dtype: FSDP|adam_freeze_key"),  # of a module's class, which FSDP2 changes
    ("needs a GPU", r"module 'torch\.cpu' has no attribute"),  # torch's own fork_rng
    ("not in dsjob", r"has no attribute '(step|rollback)_subgroup'"),
    ("another package", r"PackageNotFoundError|No module named '(mup|torchvision)|torchvision is not installed"),
    ("masters are fp32", r"fp16_master_weights_and_grads: true is not supported"),
    ("masters are fp32", r"comm dtype doesn't match module dtype"),
    ("internals", r"dsjob has no deepspeed\.|'Stub'|sitecustomize\.|isinstance\(\w+ \(\\nParameter Group"),
    ("internals", r"'(Parameter|DTensor|Adam|AdamW|MuonWithAuxAdam|Lamb|One[Bb]itLamb)' object has no"),
    ("internals", r"'(DeepSpeedZeroOptimizer|Section)' object has no"),
    ("allowed here", r"expected exception must be a BaseException type, not ZeRORuntimeException"),
    (
        "internals",
        r"type object '(DeepSpeedEngine|Init)' has no|Optimizer should be ZeROOptimizer|has no attribute '_?config'",
    ),
    (
        "internals",
        r"neither \w+Engine nor its model \w+ has an attribute|AttributeError: _",
    ),
    ("internals", r"module 'dsjob\.\S+' has no attribute|hook|ZeroOrderedDict|Stage3|InsertPostInit"),
    (
        "internals",
        r"_external_params|hooks_exist|persist_param_size|ZeRORuntimeException|BF16_Optimizer|ZeROOrderedDict|zero3_linear_wrap",
    ),
    (
        "internals",
        r"convert_to_zero_parameters|ds_param_alias|FP16_(Unf|F)usedOptimizer|bit16_groups_flat|numel\(\) > 0",
    ),
    ("no collectives of its own", r"baseline issued no collectives"),
    (
        "another class of error",
        r"different tags|inside no_sync or coalesce|cannot be nested|needs a model: a|the loss must be a scalar",
    ),
    ("another class of error", r"elastic_checkpoint_is_deprecated"),  # told by a warning, not by a logger
    ("another class of error", r"with managed_gradient_accumulation=False|error\[finite\]: fp16\."),
    ("allowed here", r"DID NOT RAISE"),
    ("another class of error", r"Regex pattern did not match|error\[(range|type)\]: fp16\.|ValidationError"),
    ("another class of error", r"already contains converted weights"),
    ("one loss scaler for every stage", r"gradients overflowed fp16 at the smallest loss scale"),
    ("refused here", r"ConfigError: |TargetError: |UsageError: "),
    ("allowed here", r"Empty parameters should be filtered out"),
    ("allowed here", r"Expected RuntimeError: inputs with|in-place modification error"),
    (
        "parameters keep their shape",
        r"go back to be 0-sized|a DTensor to a non-DTensor|mixed torch\.Tensor and DTensor",
    ),
    ("rounding of bf16 and fp16", r"Gradients differ|mismatch at|max-abs-diff|gradient \S+ differs at"),
    ("one loss scaler for every stage", r"loss_scale_config\.cur_scale == expected_loss_scale"),
    ("leaf modules of the config", r"leaf_module|'classes'|my\.Class"),
    ("errors come back on as many ranks", r"Incorrect worker error"),
    ("leaf functions return no pair", r"not enough values to unpack"),
    ("ranks hung", r"^ranks hung"),
)


def find_reason(entry: dict[str, Any]) -> str:
    """The reason why a test did not pass."""
    if entry["outcome"] == "skipped":
        said = str(entry["error"]).removeprefix("Skipped: ")
        return "skipped: " + (said.splitlines() or ["no reason given"])[0]
    said = "\n".join([entry["error"], *entry["trace"].splitlines()[-5:]])  # an assertion may say no more than its line
    return next((reason for reason, pattern in PATTERNS if re.search(pattern, said)), "other")
