"""HF Trainer's arguments as a table: the default, the corresponding keys of a job document, and remarks.

It covers `TrainingArguments` and `Seq2SeqTrainingArguments` of transformers 4.5 to 5.23, and further arguments of its
example scripts. An argument without keys is left out of the job, and `about` says why (if it is empty, there is nothing
to know). `part` names the function that reads arguments whose value cannot be copied as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. `default`: the Trainer's. `keys`: paths in the job document. `about`: a remark for the user."""

    default: Any = None
    keys: tuple[str, ...] = ()
    about: str = ""
    part: str = ""  # the group of arguments that one function reads together, if any

    @property
    def carried(self) -> bool:
        """Whether the value is copied to the job as it is."""
        return bool(self.keys) and not self.part


def _as(key: str, default: Any = None, about: str = "") -> Argument:
    """An argument whose value is copied to a key."""
    return Argument(default, (key,), about)


def _in(part: str, keys: str, default: Any = None, about: str = "") -> Argument:
    """An argument that the function for `part` reads and translates to these keys (separated by spaces)."""
    return Argument(default, tuple(keys.split()), about, part)


def _out(about: str, default: Any = None) -> Argument:
    """An argument that is left out of the job."""
    return Argument(default, (), about)


_OPTIMIZER = "optimizer.params"
_SCHEDULER = "scheduler.type scheduler.params"
_WARMUP = "scheduler.params.warmup_num_steps scheduler.params.num_warmup_steps"  # in DeepSpeed's schedules; in others
_STAGE = "zero_optimization.stage zero_optimization.offload_param zero_optimization.offload_optimizer"
_LOGS = "all records are in metrics.jsonl in the run's folder"
_HUB = "dsjob uploads nothing: convert a checkpoint and push that"
_GENERATES = "the model's own generation config, or the section generation, has it"
_SAVES = "checkpoints are always complete, and checkpoint.keep sets how many are kept"
_METRICS = "dsjob evaluates data.eval with metrics"
_DDP = "dsjob sets up DDP and FSDP2"
_RECOMPUTE = "activation_checkpointing.mode"
_RESULTS = "results will differ: "
_CONSOLE = "dsjob has its own console output"

# What a dumped config contains for arguments that nobody set.
_ACCELERATOR = {
    "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True,
    "non_blocking": False, "gradient_accumulation_kwargs": None,
}  # fmt: skip
# Defaults of earlier versions, found in files that these versions dumped.
FORMER_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "optim": ("adamw_hf", "adamw_torch"),
    "include_num_input_tokens_seen": (False,),
    "report_to": ("all", []),
}

ARGUMENTS: dict[str, Argument] = {
    # length and batch sizes
    "per_device_train_batch_size": _as("trainer.micro_batch", 8),
    "per_gpu_train_batch_size": _as("trainer.micro_batch"),
    "gradient_accumulation_steps": _as("trainer.grad_accum", 1),
    "num_train_epochs": _in("length", "trainer.max_epochs", 3.0, "ignored if max_steps is positive"),
    "max_steps": _in("length", "trainer.max_steps", -1),
    "seed": _as("trainer.seed", 42),
    "data_seed": _out("trainer.seed also determines the order of the data"),
    "full_determinism": _out("call torch.use_deterministic_algorithms in your own code", False),
    "auto_find_batch_size": _out("set trainer.micro_batch", False),
    "max_grad_norm": _as("gradient_clipping", 1.0),
    # optimizer and schedule
    "learning_rate": _in("optimizer", f"{_OPTIMIZER}.lr", 5e-5, "also warmup_max_lr of a DeepSpeed file's schedule"),
    "weight_decay": _in("optimizer", f"{_OPTIMIZER}.weight_decay", 0.0, "also for biases and norms"),
    "adam_beta1": _in("optimizer", f"{_OPTIMIZER}.betas", 0.9),
    "adam_beta2": _in("optimizer", f"{_OPTIMIZER}.betas", 0.999),
    "adam_epsilon": _in("optimizer", f"{_OPTIMIZER}.eps", 1e-8),
    "optim": _in("optimizer", "optimizer.type", "adamw_torch_fused"),
    "adafactor": _in("optimizer", "optimizer._target_", False, "old spelling of --optim adafactor"),
    "optim_args": _in("optimizer", _OPTIMIZER, None, "`name=value,...`, added to the arguments"),
    "optim_target_modules": _out("part of GaLore and APOLLO, which are not supported"),
    "lr_scheduler_type": _in("schedule", _SCHEDULER, "linear"),
    "lr_scheduler_kwargs": _in("schedule", "scheduler.params", None),
    "warmup_steps": _in("schedule", _WARMUP, 0, "a value below 1 is a share of all steps"),
    "warmup_ratio": _in("schedule", _WARMUP, 0.0, "a share of all steps"),
    # precision
    "fp16": _in("precision", "fp16.enabled amp.enabled", False),
    "bf16": _in("precision", "bf16.enabled", False),
    "fp16_backend": _in("precision", "fp16.enabled amp.enabled", "auto", "apex: the amp section"),
    "half_precision_backend": _in("precision", "fp16.enabled amp.enabled", "auto", "apex: the amp section"),
    "fp16_opt_level": _in("precision", "amp.opt_level", "O1", "only used with apex"),
    "tf32": _in("precision", "trainer.matmul_precision", None, "true: high; false: highest"),
    "fp16_full_eval": _out("evaluation uses the dtype of training", False),
    "bf16_full_eval": _out("evaluation uses the dtype of training", False),
    "gradient_checkpointing": _in("blocks", _RECOMPUTE, False, "full"),
    "gradient_checkpointing_kwargs": _out("part of gradient_checkpointing"),
    "activation_checkpointing": _in("blocks", _RECOMPUTE, False, "full"),
    "activation_checkpointing_kwargs": _out("part of activation_checkpointing"),
    "torch_compile": _in("blocks", "compile.enabled", False, "compiles each block, not the whole model"),
    "torch_compile_backend": _in("blocks", "compile.backend", None, "also enables compilation"),
    "torch_compile_mode": _in("blocks", "compile.mode", None, "also enables compilation"),
    "torchdynamo": _in("blocks", "compile.backend", None, "old spelling of torch_compile_backend"),
    "jit_mode_eval": _out("evaluation runs the model as it is", False),
    "use_ipex": _out("dsjob has no such backend", False),
    "use_liger_kernel": _out("apply the kernels in the model's factory", False),
    "liger_kernel_config": _out("part of use_liger_kernel"),
    "use_cache": _out("set it on the model's config", False),
    "label_smoothing_factor": _as("label_smoothing", 0.0),
    "neftune_noise_alpha": _out(_RESULTS + "add the noise in the model"),
    "average_tokens_across_devices": _out("always done: see trainer.loss_average", True),
    "past_index": _out(_RESULTS + "no state is passed from batch to batch", -1),
    "torch_empty_cache_steps": _out("dsjob does not empty the allocator's cache"),
    # distribution
    "deepspeed": _in("files", "zero_optimization optimizer scheduler", None, "path or contents; dsjob import reads it"),
    "deepspeed_config": _in("files", "zero_optimization optimizer scheduler", None, "path; dsjob import reads it"),
    "sharded_ddp": _in("spread", _STAGE, "", "FairScale: simple, zero_dp_2 are stage 2, zero_dp_3 is stage 3; offload"),
    "fsdp": _in("spread", _STAGE, "", "full_shard is stage 3, shard_grad_op stage 2, no_shard stage 0; offload"),
    "fsdp_config": _in("spread", _STAGE),
    "fsdp_min_num_params": _out("dsjob finds the blocks itself", 0),
    "fsdp_transformer_layer_cls_to_wrap": _out("dsjob finds the blocks itself"),
    "parallelism_config": _out("set tensor_parallel.size, context_parallel.size and pipeline.stages"),
    "accelerator_config": _out("dsjob splits batches itself", _ACCELERATOR),
    "local_rank": _out("", -1),
    "no_cuda": _in("device", "launch.device", False),
    "use_cpu": _in("device", "launch.device", False),
    "use_mps_device": _out("dsjob runs on CPU or CUDA", False),
    "xpu_backend": _out("dsjob's backends are nccl and gloo"),
    "ddp_backend": _in("device", "launch.backend"),
    "ddp_timeout": _as("launch.timeout", 1800),
    "ddp_find_unused_parameters": _out("parameters without a gradient need no switch"),
    "ddp_bucket_cap_mb": _out(_DDP),
    "ddp_broadcast_buffers": _out(_DDP),
    "ddp_static_graph": _out(_DDP),
    "mp_parameters": _out("SageMaker's model parallelism is not supported", ""),
    "tpu_num_cores": _out("dsjob does not support TPUs"),
    "tpu_metrics_debug": _out("dsjob does not support TPUs", False),
    "_n_gpu": _out("launch.nproc sets it", 1),
    # data
    "dataloader_num_workers": _as("data.num_workers", 0),
    "dataloader_pin_memory": _as("data.pin_memory", True),
    "dataloader_drop_last": _out("epochs follow one another without a gap, so every batch is full", False),
    "dataloader_persistent_workers": _out("workers live as long as the run", False),
    "dataloader_prefetch_factor": _out("torch's default is used"),
    "dataloader_multiprocessing_context": _out("torch's default is used"),
    "dataloader_in_order": _out("samples are always delivered in order", True),
    "group_by_length": _as("data.group_by_length", False),
    "train_sampling_strategy": _out(_RESULTS + "dsjob uses random order (data.shuffle)", "random"),
    "length_column_name": _out("data.group_by_length reads the attribute `lengths` of the dataset", "length"),
    "sortish_sampler": _out(_RESULTS + "dsjob uses random order", False),
    "remove_unused_columns": _out("the model receives batches as data.collate makes them", True),
    "label_names": _in("targets", "targets", about="for metrics; the model receives the whole batch"),
    "ignore_data_skip": _out("a resumed run continues in the middle of an epoch without replaying it", False),
    # logging, evaluation, saving
    "logging_steps": _in("cadence", "trainer.log_every", 500),
    "logging_strategy": _in("cadence", "trainer.log_every", "steps"),
    "eval_strategy": _in("cadence", "trainer.eval_every data.eval", "no"),
    "evaluation_strategy": _in("cadence", "trainer.eval_every data.eval", "no", "old spelling of eval_strategy"),
    "evaluate_during_training": _in("cadence", "trainer.eval_every data.eval", False, "old: eval_strategy=steps"),
    "do_train": _in("tasks", "tasks", False, "without it, --do_eval and --do_predict alone do not train"),
    "do_eval": _in("tasks", "tasks data.eval", False),
    "do_predict": _in("tasks", "tasks data.test", False, "the test set is a placeholder for you to fill in"),
    "eval_steps": _in("cadence", "trainer.eval_every", None, "if unset: logging_steps"),
    "eval_on_start": _in("cadence", "trainer.eval_at_start", False),
    "eval_delay": _out("the first evaluation is after trainer.eval_every steps", 0),
    "save_strategy": _in("cadence", "checkpoint.every checkpoint.best", "steps"),
    "save_steps": _in("cadence", "checkpoint.every", 500),
    "save_total_limit": _in("cadence", "checkpoint.keep", None, "if unset, all are kept: 0"),
    "output_dir": _as("output.dir"),
    "overwrite_output_dir": _in("resume", "checkpoint.resume", False, "true: never, which starts from scratch"),
    "resume_from_checkpoint": _in("resume", "checkpoint.resume", None, "true: required; not for Trainer checkpoints"),
    "run_name": _in("name", "name"),
    "logging_first_step": _out("the first record, after trainer.log_every steps, includes the first step", False),
    "logging_dir": _in("services", "monitor.tensorboard.output_path", None, "with report_to tensorboard"),
    "logging_nan_inf_filter": _out("a loss that is not finite always stops the job", True),
    "log_on_each_node": _out(_CONSOLE, True),
    "log_level": _out(_CONSOLE, "passive"),
    "log_level_replica": _out(_CONSOLE, "warning"),
    "disable_tqdm": _out(_CONSOLE),
    "debug": _in("guard", "callbacks.nan_guard", "", "underflow_overflow: NanGuard"),
    "skip_memory_metrics": _out("log records have memory/peak_gib; dsjob.callbacks.MemoryUse adds more", True),
    "include_tokens_per_second": _out(_LOGS, False),
    "include_num_input_tokens_seen": _out(_LOGS, "no"),
    "report_to": _in("services", "monitor.tensorboard monitor.wandb monitor.comet monitor.mlflow", "none"),
    "project": _out(_LOGS, "huggingface"),
    "trackio_space_id": _out(_LOGS),
    "trackio_bucket_id": _out(_LOGS),
    "trackio_static_space_id": _out(_LOGS),
    "per_device_eval_batch_size": _in("evaluation", "trainer.eval_micro_batch", 8, "metrics do not depend on it"),
    "per_gpu_eval_batch_size": _in("evaluation", "trainer.eval_micro_batch", None, "the old spelling"),
    "prediction_loss_only": _out("dsjob computes a metric only if the job names it (metrics)", False),
    "use_legacy_prediction_loop": _out("dsjob has one evaluation loop", False),
    "eval_accumulation_steps": _out("dsjob feeds metrics batch by batch and keeps no predictions on the device"),
    "eval_do_concat_batches": _out(_METRICS, True),
    "eval_use_gather_object": _out(_METRICS, False),
    "include_for_metrics": _out(_METRICS),
    "include_inputs_for_metrics": _out(_METRICS, False),
    "batch_eval_metrics": _out(_METRICS, False),
    "load_best_model_at_end": _in("best", "checkpoint.load_best_at_end checkpoint.best", False),
    "metric_for_best_model": _in("best", "checkpoint.best.metric metrics", None, "the metric is a placeholder"),
    "greater_is_better": _in("best", "checkpoint.best.mode", None, "max or min; if unset: min for a loss"),
    "save_safetensors": _out("checkpoints are always safetensors", True),
    "save_on_each_node": _out(_SAVES, False),
    "save_only_model": _out(_SAVES, False),
    "enable_jit_checkpoint": _out(_SAVES, False),
    "restore_callback_states_from_checkpoint": _out(_SAVES, False),
    "predict_with_generate": _in("tasks", "generation", False, "the tokenizer is for you to fill in"),
    "generation_max_length": _in("tasks", "generation.max_length"),
    "generation_num_beams": _in("tasks", "generation.num_beams"),
    "generation_config": _out("write its values into the section generation"),
    "push_to_hub": _out(_HUB, False),
    "push_to_hub_model_id": _out(_HUB),
    "push_to_hub_organization": _out(_HUB),
    "push_to_hub_token": _out(_HUB, "<PUSH_TO_HUB_TOKEN>"),
    "hub_model_id": _out(_HUB),
    "hub_strategy": _out(_HUB, "every_save"),
    "hub_token": _out(_HUB, "<HUB_TOKEN>"),
    "hub_private_repo": _out(_HUB),
    "hub_always_push": _out(_HUB, False),
    "hub_revision": _out(_HUB),
}  # fmt: skip

_TOKENS = "the dataset that data.train names prepares its data"
_TASK = "specific to the script's task"
_PAIRS = "data.train data.eval"

SCRIPT_ARGUMENTS: dict[str, Argument] = {
    "model_name_or_path": _in("task", "model", None, "T5: the recipe's factory; otherwise transformers' own"),
    "model_revision": _in("task", "model.revision", "main"),
    "config_name": _out("pass it to a model factory of your own"),
    "config_overrides": _out("pass it to a model factory of your own"),
    "model_type": _out("pass it to a model factory of your own"),
    "tokenizer_name": _in("task", "data.train.tokenizer"),
    "use_fast_tokenizer": _out(_TOKENS, True),
    "cache_dir": _out("set HF_HOME"),
    "token": _out("secrets do not belong in a document: set HF_TOKEN"),
    "use_auth_token": _out("secrets do not belong in a document: set HF_TOKEN"),
    "trust_remote_code": _out("dsjob does not run code from the hub", False),
    "torch_dtype": _out("weights are loaded in fp32; the fp16 and bf16 sections set the compute dtype"),
    "dtype": _out("weights are loaded in fp32; the fp16 and bf16 sections set the compute dtype"),
    "low_cpu_mem_usage": _out("dsjob decides how the model is built", False),
    "attn_implementation": _in("task", "model.attn_implementation"),
    "resize_position_embeddings": _out(_TASK),
    "freeze_encoder": _out(_RESULTS + "freeze in a model factory of your own", False),
    "freeze_embeds": _out(_RESULTS + "freeze in a model factory of your own", False),
    "ignore_mismatched_sizes": _out("pass it to a model factory of your own", False),
    "train_file": _in("task", "data.train.path", None, "JSONL or CSV for T5; otherwise a placeholder"),
    "validation_file": _in("task", "data.eval.path"),
    "test_file": _in("task", "data.test.path"),
    "dataset_name": _in("task", _PAIRS, None, "becomes a placeholder with this name, because dsjob downloads nothing"),
    "dataset_config_name": _in("task", _PAIRS),
    "task_name": _in("task", _PAIRS),
    "source_lang": _in("task", _PAIRS),
    "target_lang": _in("task", _PAIRS),
    "data_dir": _in("task", _PAIRS),
    "max_train_samples": _in("task", "data.train.max_samples"),
    "max_eval_samples": _in("task", "data.eval.max_samples"),
    "max_val_samples": _in("task", "data.eval.max_samples", None, "old spelling of max_eval_samples"),
    "max_predict_samples": _in("task", "data.test.max_samples"),
    "max_test_samples": _in("task", "data.test.max_samples", None, "old spelling of max_predict_samples"),
    "max_source_length": _in("task", "data.train.max_source data.eval.max_source", 1024),
    "max_target_length": _in("task", "data.train.max_target data.eval.max_target", 128),
    "val_max_target_length": _out("evaluation truncates targets like training"),
    "text_column": _in("task", "data.train.source data.eval.source"),
    "summary_column": _in("task", "data.train.target data.eval.target"),
    "source_prefix": _out(_RESULTS + "add the prefix to the texts", ""),
    "block_size": _in("task", _PAIRS),
    "max_seq_length": _in("task", _PAIRS),
    "pad_to_max_length": _out("batches are padded to their longest sample", False),
    "ignore_pad_token_for_loss": _out("the loss always ignores padding", True),
    "forced_bos_token": _out(_GENERATES),
    "num_beams": _out(_GENERATES),
    "lang": _out(_TASK),
    "preprocessing_num_workers": _out(_TOKENS),
    "overwrite_cache": _out(_TOKENS, False),
    "keep_linebreaks": _out(_TOKENS, True),
    "line_by_line": _out(_TOKENS, False),
    "mlm_probability": _out(_TOKENS, 0.15),
    "validation_split_percentage": _out(_TOKENS, 5),
    "streaming": _out(_TOKENS, False),
    "n_train": _out("old spelling of --max_train_samples", -1),
    "n_val": _out("old spelling of --max_eval_samples", -1),
    "task": _out(_TASK),
}  # fmt: skip

# A file or command with one of these arguments is for the Trainer, so the Trainer's defaults apply to the others.
TRAINER_ONLY = frozenset({
    "output_dir", "overwrite_output_dir", "do_train", "do_eval", "per_device_train_batch_size", "num_train_epochs",
    "lr_scheduler_type", "evaluation_strategy", "eval_strategy", "save_strategy", "sharded_ddp",
})  # fmt: skip
