"""The table of rules: a document that breaks each and a near one that does not; where rules speak, and where not."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from job_documents import find_problems, make_job, write_json

import dsjob
from dsjob.contract.check import check_config, check_job
from dsjob.contract.rules import EXPLANATIONS, RULES
from dsjob.errors import Problem
from dsjob.front.validate import validate_file as validate

ON = {"enabled": True}
LOW_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
TWO_PARTS = {"tensor_parallel": {"autotp_size": 2}}
BY_DEEPSPEED = {"engine": "deepspeed"}
CALLED = {"_target_": "mine.called"}
TWO = {"a": {"model": CALLED}, "b": {"model": CALLED}}
BEST_AVERAGES = {"best": {}, "load_best_at_end": True, "ema": True}
EVAL = {"train": {"_target_": "a.b"}, "eval": {"_target_": "a.b"}}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def schedule(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def with_head(**keys: Any) -> dict[str, Any]:
    method = {"type": "Adam", "params": {"lr": 0.1}, "param_groups": {"head": {"match": "head.*", **keys}}}
    return {"optimizer": method}


def course(**keys: Any) -> dict[str, Any]:
    return {"trainer": {"micro_batch": 4, "max_steps": 10, **keys}}


def contiguous(**keys: Any) -> dict[str, Any]:
    return {"activation_checkpointing": {"contiguous_memory_optimization": True, **keys}}


def again(**keys: Any) -> dict[str, Any]:
    return {"activation_checkpointing": keys}


def stops_on(name: str) -> dict[str, Any]:
    return {"callbacks": {"stop": {"_target_": "a.Stop", "monitor": name}}}


def stops_early(**arguments: Any) -> dict[str, Any]:
    return {"callbacks": {"stop": {"_target_": "dsjob.callbacks.EarlyStopping", **arguments}}}


def accuracy(name: str) -> dict[str, Any]:
    return {"data": EVAL, "metrics": {name: {"_target_": "a.b"}}}


# Rule, what breaks it in a job that is good otherwise, the path that it is told at, and what is near and all right.
JOBS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        "no-step-to-call",
        {"trainer": {"disable_auto_grad_accumulation": True}},
        "trainer.disable_auto_grad_accumulation",
        {"trainer": {"disable_auto_grad_accumulation": True, "step": {"_target_": "a.step"}}},
    ),
    (
        "length-unknown",
        {**schedule("cosine"), "trainer": {"max_length": "30min"}},
        "trainer.max_length",
        {**schedule("cosine"), "trainer": {"max_length": "30min", "max_steps": 100}},
    ),
    (
        "loss-parallel-with",
        {"tensor_parallel": {"size": 2, "loss_parallel": True}, "label_smoothing": 0.1},
        "label_smoothing",
        {"tensor_parallel": {"size": 2}, "label_smoothing": 0.1},
    ),
    (
        "context-parallel-with",
        {"context_parallel": {"size": 2}, **BY_DEEPSPEED},
        "engine",
        {"context_parallel": {"size": 2}},
    ),
    ("tensor-parallel-with", {**TWO_PARTS, **BY_DEEPSPEED}, "engine", TWO_PARTS),
    (
        "tensor-parallel-with",
        {**TWO_PARTS, **course(mpu={"_target_": "a.mpu"})},
        "trainer.mpu",
        {"tensor_parallel": {"size": 1}, **course(mpu={"_target_": "a.mpu"})},
    ),
    (
        "pipeline-micro-batches",
        {"pipeline": {"stages": 2, "micro_batches": 4}, **course(grad_accum=2)},
        "pipeline.micro_batches",
        {"pipeline": {"stages": 2, "micro_batches": 4}, **course(grad_accum=4)},
    ),
    ("pipeline-with", {"pipeline": {"stages": 2}, **BY_DEEPSPEED}, "engine", {"pipeline": {"stages": 2}}),
    (
        "pipeline-with",
        {"pipeline": {"stages": 2}, **course(step={"_target_": "a.step"})},
        "trainer.step",
        {"pipeline": {"stages": 1}, **course(step={"_target_": "a.step"})},
    ),
    ("gpus", {"launch": {"include": [0], "exclude": [1]}}, "launch.exclude", {"launch": {"exclude": [1]}}),
    ("gpus", {"launch": {"include": "a:0@b:1"}}, "launch.include", {"launch": {"include": "localhost:0,2"}}),
    (
        "processes",
        {"launch": {"nproc": 64}, "data": {**EVAL, "num_workers": 128}},
        "data.num_workers",
        {"launch": {"nproc": 64}, "data": {**EVAL, "num_workers": 127}},
    ),
    ("gpus", {"launch": {"include": [0], "nproc": 2}}, "launch.include", {"launch": {"include": [0, 1], "nproc": 2}}),
    ("fp16-with-bf16", {"fp16": ON, "bf16": ON}, "bf16.enabled", {"fp16": {"enabled": False}, "bf16": ON}),
    ("amp-with-half-precision", {"amp": ON, "bf16": ON}, "amp.enabled", {"amp": {"enabled": False}, "bf16": ON}),
    ("amp-with-half-precision", {"amp": ON, **zero(1)}, "amp.enabled", {"amp": ON, **zero(0)}),
    (
        "sum-in-other-precision",
        {"data_types": {"grad_accum_dtype": "fp16"}, "bf16": ON},
        "data_types.grad_accum_dtype",
        {"data_types": {"grad_accum_dtype": "fp16"}, "bf16": ON, **zero(1)},
    ),
    (
        "sum-in-half-precision-piped",
        {"data_types": {"grad_accum_dtype": "bf16"}, "pipeline": {"stages": 2}, **zero(1)},
        "data_types.grad_accum_dtype",
        {"data_types": {"grad_accum_dtype": "bf16"}, **zero(1)},
    ),
    ("predivide-stage", {"prescale_gradients": True, **zero(1)}, "prescale_gradients", {"prescale_gradients": True}),
    (
        "predivide-stage",
        {"gradient_predivide_factor": 2, **zero(3)},
        "gradient_predivide_factor",
        {"gradient_predivide_factor": 1.0, **zero(3)},
    ),
    (
        "autocast-with-half-precision",
        {"torch_autocast": ON, "bf16": ON},
        "torch_autocast.enabled",
        {"torch_autocast": ON, "bf16": LOW_MASTERS},
    ),
    (
        "half-precision-masters",
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        "bf16.bf16_optimizer_states",
        {"bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}},
    ),
    (
        "half-precision-masters",
        {"bf16": LOW_MASTERS, "fp16": {"fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads",
        {"bf16": LOW_MASTERS, "fp16": {"fp16_master_weights_and_grads": False}},
    ),
    (
        "bf16-masters-with",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **optimizer("Lamb")},
        "optimizer.type",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **optimizer("Lion")},
    ),
    (
        "static-loss-scale-with-lamb",
        {"fp16": {"enabled": True, "loss_scale": 128}, **optimizer("Lamb")},
        "fp16.loss_scale",
        {"fp16": {"enabled": True, "loss_scale": 0}, **optimizer("Lamb")},
    ),
    (
        "compressing-optimizer-stage",
        {**zero(1), **optimizer("OneBitAdam")},
        "zero_optimization.stage",
        {**zero(0), **optimizer("OneBitAdam")},
    ),
    (
        "compressing-optimizer-stage",
        {**zero(2), **optimizer("zerooneadam")},
        "zero_optimization.stage",
        {**zero(2), **optimizer("Lamb")},
    ),
    (
        "offload-param-stage",
        zero(2, offload_param={"device": "cpu"}),
        "zero_optimization.offload_param.device",
        zero(3, offload_param={"device": "cpu"}),
    ),
    (
        "offload-optimizer-stage",
        zero(0, offload_optimizer={"device": "cpu"}),
        "zero_optimization.offload_optimizer.device",
        zero(1, offload_optimizer={"device": "cpu"}),
    ),
    (
        "nvme-stage",
        {**zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/n"}), "engine": "deepspeed"},
        "zero_optimization.offload_optimizer.device",
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
    ),
    (
        "nvme-path",
        zero(1, offload_optimizer={"device": "nvme"}),
        "zero_optimization.offload_optimizer.device",
        zero(1, offload_optimizer={"device": "nvme", "nvme_path": "n"}),
    ),
    (
        "nvme-path",
        zero(1, offload_optimizer={"device": "nvme", "nvme_path": "s3://bucket/n"}),
        "zero_optimization.offload_optimizer.nvme_path",
        zero(1, offload_optimizer={"device": "cpu", "nvme_path": "s3://bucket/n"}),
    ),
    (
        "nvme-path",
        zero(3, offload_param={"device": "nvme"}, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
        "zero_optimization.offload_param.device",
        zero(3, offload_param={"device": "nvme", "nvme_path": "n"}),
    ),
    (
        "nvme-optimizer",
        {**zero(3, offload_param={"device": "nvme", "nvme_path": "/n"}), "optimizer": {"type": "Muon"}},
        "zero_optimization.offload_param.device",
        {**zero(3, offload_param={"device": "nvme", "nvme_path": "/n"}), "optimizer": {"type": "Lion"}},
    ),
    (
        "nvme-optimizer",
        {**zero(1, offload_optimizer={"device": "nvme", "nvme_path": "/n"}), "optimizer": {"type": "Lamb"}},
        "zero_optimization.offload_optimizer.device",
        {**zero(1, offload_optimizer={"device": "nvme", "nvme_path": "/n"}), "optimizer": {"type": "NAdam"}},
    ),
    (
        "offload-ratio-stage",
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        "zero_optimization.offload_optimizer.ratio",
        zero(2, offload_optimizer={"device": "cpu", "ratio": 1}),
    ),
    (
        "mics-stage",
        zero(2, mics_shard_size=8),
        "zero_optimization.mics_shard_size",
        zero(2, mics_shard_size=-1),
    ),
    (
        "mics-stage",
        zero(1, zero_hpz_partition_size=8),
        "zero_optimization.zero_hpz_partition_size",
        zero(3, zero_hpz_partition_size=8),
    ),
    (
        "odd-allgather-bucket",
        zero(1, allgather_bucket_size=501),
        "zero_optimization.allgather_bucket_size",
        zero(1, allgather_bucket_size=5e8),
    ),
    (
        "tensor-size-twice",
        {"tensor_parallel": {"size": 2, "autotp_size": 4}},
        "tensor_parallel.autotp_size",
        {"tensor_parallel": {"size": 2, "autotp_size": 2}},
    ),
    (
        "partition-config",
        {"tensor_parallel": {"size": 2, "plan": {"up": "colwise"}, "preset_model": "llama"}},
        "tensor_parallel.preset_model",
        {"tensor_parallel": {"size": 2, "preset_model": "llama"}},
    ),
    ("tensor-parallel-compiled", {**TWO_PARTS, "compile": {"enabled": True}}, "compile.enabled", TWO_PARTS),
    (
        "mesh-groups",
        {**TWO_PARTS, **zero(3, mics_shard_size=2)},
        "zero_optimization.mics_shard_size",
        {**TWO_PARTS, **zero(3, mics_shard_size=-1)},
    ),
    (
        "mesh-groups",
        {"pipeline": {"stages": 2}, **zero(3, mics_shard_size=1)},
        "zero_optimization.mics_shard_size",
        zero(3, mics_shard_size=1),
    ),
    (
        "mesh-groups",
        {"context_parallel": {"size": 2}, **zero(3, zero_hpz_partition_size=2)},
        "zero_optimization.zero_hpz_partition_size",
        {"context_parallel": {"size": 2}, **zero(3, zero_hpz_partition_size=1)},
    ),
    (
        "tensor-parallel-optimizer",
        {**TWO_PARTS, "optimizer": {"type": "OneBitAdam"}},
        "optimizer.type",
        {**TWO_PARTS, "optimizer": {"type": "Muon"}},
    ),
    (
        "zero-bubble-stage",
        {"pipeline": {"stages": 4, "schedule": "zero-bubble"}, **zero(3)},
        "pipeline.schedule",
        {"pipeline": {"stages": 4, "schedule": "zero-bubble"}, **zero(2)},
    ),
    (
        "pipeline-partition",
        {"pipeline": {"stages": 4, "partition": "typ:Block"}},
        "pipeline.partition",
        {"pipeline": {"stages": 4, "partition": "TYPE:Block"}},
    ),
    (
        "pipeline-partition",
        {"pipeline": {"stages": 4, "partition": "type:(Block"}},
        "pipeline.partition",
        {"pipeline": {"stages": 4, "partition": "Uniform"}},
    ),
    (
        "pipeline-chunks",
        {"pipeline": {"stages": 4, "schedule": "interleaved"}},
        "pipeline.schedule",
        {"pipeline": {"stages": 4, "schedule": "interleaved", "chunks": 2}},
    ),
    (
        "pipeline-chunks",
        {"pipeline": {"stages": 4, "chunks": 2}},
        "pipeline.chunks",
        {"pipeline": {"stages": 4, "schedule": "zero-bubble", "chunks": 2}},
    ),
    (
        "pipeline-offload",
        {"pipeline": {"stages": 2}, **zero(3, offload_param={"device": "cpu"})},
        "zero_optimization.offload_param.device",
        {"pipeline": {"stages": 2}, **zero(3, offload_optimizer={"device": "cpu"})},
    ),
    (
        "contiguous-checkpointing",
        contiguous(number_checkpoints=4),
        "activation_checkpointing.contiguous_memory_optimization",
        contiguous(number_checkpoints=4, partition_activations=True),
    ),
    (
        "contiguous-checkpointing",
        contiguous(partition_activations=True),
        "activation_checkpointing.contiguous_memory_optimization",
        {"activation_checkpointing": {"partition_activations": True}},
    ),
    (
        "selective-with-autocast",
        {**again(mode="selective"), "torch_autocast": ON, **zero(2)},
        "activation_checkpointing.mode",
        {**again(mode="selective"), "torch_autocast": ON},
    ),
    (
        "selective-compiled",
        {**again(mode="selective", cpu_checkpointing=True), "compile": ON},
        "activation_checkpointing.cpu_checkpointing",
        {**again(mode="full", cpu_checkpointing=True), "compile": ON},
    ),
    (
        "checkpointing-without-mode",
        again(interval=2),
        "activation_checkpointing.interval",
        again(interval=2, mode="full"),
    ),
    (
        "checkpointing-without-mode",
        again(cpu_checkpointing=True),
        "activation_checkpointing.cpu_checkpointing",
        again(cpu_checkpointing=True, mode="selective"),
    ),
    (
        "compile-mode",
        {"compile": {**ON, "backend": "aot_eager", "mode": "max-autotune"}},
        "compile.mode",
        {"compile": {**ON, "mode": "max-autotune"}},
    ),
    (
        "clipping-in-optimizer",
        optimizer("Lamb", max_grad_norm=1),
        "optimizer.params.max_grad_norm",
        {"gradient_clipping": 1},
    ),
    ("unknown-name", optimizer("Adamm", lr=1), "optimizer.type", optimizer("Adam", lr=1)),
    ("optimizer-needs-closure", optimizer("LBFGS", lr=1), "optimizer.type", optimizer("SGD", lr=1)),
    (
        "rate-overruled",
        {**optimizer("Adam", lr=0.1), **schedule("WarmupDecayLR")},
        "optimizer.params.lr",
        {**optimizer("Adam", lr=0.1), **schedule("WarmupDecayLR", warmup_max_lr=0.1)},
    ),
    (
        "rate-overruled",
        {**optimizer("Adam", lr=0.1), **schedule("WarmupLR", warmup_max_lr=0.2)},
        "optimizer.params.lr",
        {**optimizer("Adam", lr=0.1), **schedule("WarmupLR")},
    ),
    (
        "rate-overruled",
        {**optimizer("Adam", lr=0.1), **schedule("OneCycle", cycle_min_lr=0.2, cycle_max_lr=0.3)},
        "optimizer.params.lr",
        {**optimizer("Adam", lr=0.3), **schedule("OneCycle", cycle_min_lr=0.2, cycle_max_lr=0.3)},
    ),
    (
        "rate-overruled",
        {**optimizer("Adam", lr=0.1), **schedule("LRRangeTest")},
        "optimizer.params.lr",
        {**optimizer("Adam", lr=0.001), **schedule("LRRangeTest")},
    ),
    (
        "rate-overruled",
        {**optimizer("SGD", lr=0.1), **schedule("OneCycleLR", max_lr=0.3, total_steps=9)},
        "optimizer.params.lr",
        {**optimizer("SGD", lr=0.1), **schedule("CyclicLR", base_lr=0.1, max_lr=0.3)},
    ),
    (
        "rate-overruled",
        {**with_head(lr=0.2), **schedule("WarmupLR", warmup_max_lr="auto")},
        "optimizer.param_groups.head.lr",
        {**with_head(lr=0.2), **schedule("WarmupLR")},
    ),
    (
        "rate-overruled",
        {**with_head(lr=0.2), **schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=[0.3, 0.4])},
        "optimizer.param_groups.head.lr",
        {**with_head(lr=0.2), **schedule("OneCycle", cycle_min_lr=[0.1, 0.2], cycle_max_lr=[0.3, 0.4])},
    ),
    (
        "rate-overruled",
        {**optimizer("Muon", muon_lr=0.02, adam_lr=0.001), **schedule("WarmupDecayLR")},
        "optimizer.params.muon_lr",
        {**optimizer("Muon", muon_lr=0.02, adam_lr=0.001), **schedule("WarmupCosineLR")},
    ),
    (
        "rate-overruled",
        {**optimizer("Muon", muon_lr=0.02, adam_lr=0.001), **schedule("WarmupLR", warmup_max_lr=0.02)},
        "optimizer.params.adam_lr",
        {**optimizer("Muon", muon_lr=0.02, adam_lr=0.001), **schedule("WarmupLR", warmup_max_lr=[0.02, 0.001])},
    ),
    (
        "rate-overruled",
        {
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
            "scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.3},
        },
        "optimizer.lr",
        {
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
            "scheduler": {"_target_": "mine.OneCycleLR", "max_lr": 0.3},
        },
    ),
    (
        "warmup-backwards",
        schedule("WarmupLR", warmup_min_lr=0.01, warmup_max_lr=0.001),
        "scheduler.params.warmup_min_lr",
        schedule("WarmupLR", warmup_min_lr=0, warmup_max_lr=0.001),
    ),
    (
        "warmup-backwards",
        schedule("OneCycle", cycle_min_lr=0.2, cycle_max_lr=0.1),
        "scheduler.params.cycle_min_lr",
        schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.1),
    ),
    (
        "warmup-beyond-end",
        schedule("WarmupLR", warmup_num_steps=11),
        "scheduler.params.warmup_num_steps",
        schedule("WarmupLR", warmup_num_steps=10),
    ),
    (
        "warmup-of-zero",
        schedule("WarmupLR", warmup_num_steps=0),
        "scheduler.params.warmup_num_steps",
        schedule("WarmupLR", warmup_num_steps=1),
    ),
    (
        "schedule-too-short",
        schedule("WarmupCosineLR", total_num_steps=9, warmup_num_steps=2),
        "scheduler.params.total_num_steps",
        schedule("WarmupCosineLR", total_num_steps=10, warmup_num_steps=2),
    ),
    (
        "momentum-not-cycled",
        {**optimizer("SGD"), **schedule("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_momentum=True)},
        "scheduler.params.cycle_momentum",
        {**optimizer("Adam"), **schedule("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_momentum=True)},
    ),
    (
        "schedule-needs-evaluation",
        {**schedule("ReduceLROnPlateau"), **course(eval_every=5)},
        "scheduler.type",
        {**schedule("ReduceLROnPlateau"), **course(eval_every=5), "data": EVAL},
    ),
    (
        "schedule-needs-evaluation",
        {**schedule("ReduceLROnPlateau"), "data": EVAL},
        "scheduler.type",
        {**schedule("StepLR", step_size=1), "data": EVAL},
    ),
    (
        "schedule-incomplete",
        schedule("warmup_stable_decay", num_training_steps=9),
        "scheduler",
        schedule("warmup_stable_decay", num_training_steps=9, num_decay_steps=1),
    ),
    (
        "empty-param-group",
        {"optimizer": {"type": "Adam", "params": {"lr": 1}, "param_groups": {"a": {"match": ["*bias"]}}}},
        "optimizer.param_groups.a",
        {"optimizer": {"type": "Adam", "params": {"lr": 1}, "param_groups": {"a": {"match": ["*"], "lr": 2}}}},
    ),
    ("finite", {"model": {"_target_": "a.b", "x": [1.0, float("inf")]}}, "model.x[1]", {}),
    ("no-end", {"trainer": {"micro_batch": 1}}, "trainer", {"trainer": {"micro_batch": 1, "max_epochs": 0.5}}),
    ("no-optimizer", {"optimizer": None}, "optimizer", {"optimizer": {"_target_": "a.b"}}),
    (
        "model-or-models",
        {"models": TWO, **course(step=CALLED)},
        "models",
        {"model": None, "models": TWO, **course(step=CALLED)},
    ),
    (
        "model-or-models",
        {"models": TWO, "model": None},
        "models",
        {"model": None, "models": TWO, **course(step=CALLED)},
    ),
    ("model-or-models", {"loss": CALLED, **course(step=CALLED)}, "loss", {"loss": CALLED}),
    ("model-or-models", {"inputs": ["x"], **course(step=CALLED)}, "inputs", {"inputs": ["x"]}),
    ("one-loss", {"loss": CALLED, "losses": {"a": CALLED}}, "losses", {"losses": {"a": CALLED}}),
    ("one-loss", {"loss": CALLED, "label_smoothing": 0.1}, "label_smoothing", {"loss": CALLED, "label_smoothing": 0}),
    ("one-loss", {"label_smoothing": 0.1, "targets": ["a", "b"]}, "targets", {"label_smoothing": 0.1}),
    (
        "resume-word",
        {"checkpoint": {"resume": "nver"}, "output": {"dir": "run"}},
        "checkpoint.resume",
        {"checkpoint": {"resume": "step-00000120"}, "output": {"dir": "run"}},
    ),
    (
        "resume-word",
        {"checkpoint": {"resume": "no", "dir": "s3://bucket/run"}},
        "checkpoint.resume",
        {"checkpoint": {"resume": "never"}},
    ),
    (
        "resume-in-new-folder",
        {"checkpoint": {"resume": "maybe"}},
        "checkpoint.resume",
        {"output": {"dir": "run/%time"}},
    ),
    (
        "no-mpu",
        course(model_parallel_size=2),
        "trainer.model_parallel_size",
        course(model_parallel_size=1),
    ),
    (
        "no-best",
        {"checkpoint": {"load_best_at_end": True}},
        "checkpoint.load_best_at_end",
        {"checkpoint": {"load_best_at_end": True, "best": {"keep": 2}}, "data": EVAL},
    ),
    (
        "no-direction",
        {"checkpoint": {"best": {"metric": "eval/f1"}}, "data": EVAL, **course(eval_step=CALLED)},
        "checkpoint.best.mode",
        {"checkpoint": {"best": {"metric": "eval/f1", "mode": "max"}}, "data": EVAL, **course(eval_step=CALLED)},
    ),
    (
        "no-direction",
        {**stops_early(metric="eval/f1"), "data": EVAL, **course(parts=CALLED)},
        "callbacks.stop.mode",
        {**stops_early(metric="eval/valid_loss"), "data": EVAL, **course(parts=CALLED)},
    ),
    (
        "direction-from-metric",
        {"checkpoint": {"best": {"metric": "eval/acc"}}, **accuracy("acc")},
        "checkpoint.best.mode",
        {
            "checkpoint": {"best": {"metric": "eval/acc"}},
            "data": EVAL,
            "metrics": {"acc": {"_target_": "torchmetrics.Accuracy"}},
        },
    ),
    (
        "no-averages",
        {"checkpoint": BEST_AVERAGES, "data": EVAL, **stops_early()},
        "checkpoint.ema",
        {"checkpoint": BEST_AVERAGES, "data": EVAL, "callbacks": {"a": {"_target_": "dsjob.callbacks.EMA"}}},
    ),
    (
        "no-averages",
        {"checkpoint": BEST_AVERAGES, "data": EVAL},
        "checkpoint.ema",
        {"checkpoint": BEST_AVERAGES, "data": EVAL, "callbacks": {"a": {"_target_": "mine.Averages"}}},
    ),
    (
        "unused-averages",
        {"checkpoint": {"ema": True}},
        "checkpoint.ema",
        {"checkpoint": {"ema": True, "resume": "a/b"}},
    ),
    (
        "own-loader",
        {"data": {"train": CALLED, "loader": CALLED, "shuffle_buffer": 9}},
        "data.shuffle_buffer",
        {"data": {"train": CALLED, "shuffle_buffer": 9}},
    ),
    ("no-train-data", {"data": {"eval": CALLED}}, "data", {"data": {"eval": CALLED}, "tasks": ["eval"]}),
    ("no-task-data", {"tasks": ["train", "eval"]}, "tasks", {"tasks": ["train", "eval"], "data": EVAL}),
    ("no-eval-data", course(eval_step=CALLED), "trainer.eval_step", {**course(eval_step=CALLED), "data": EVAL}),
    (
        "generation-eval-step",
        {"generation": {}, **course(eval_step=CALLED), "data": EVAL},
        "generation",
        {"generation": {}, "data": EVAL},
    ),
    ("no-eval-data", course(eval_every=5), "trainer.eval_every", {**course(eval_every=5), "data": EVAL}),
    ("no-eval-data", course(eval_at_start=True), "trainer.eval_at_start", course(eval_at_start=False)),
    ("no-eval-data", {"metrics": {"a": {"_target_": "a.b"}}}, "metrics", accuracy("a")),
    (
        "no-eval-data",
        {"metrics": {"a": {"_target_": "a.b", "phases": ["train", "eval"]}}},
        "metrics",
        {"metrics": {"a": {"_target_": "a.b", "phases": ["train"]}}},
    ),
    (
        "unknown-metric",
        {**stops_on("eval/loss/f1"), **accuracy("acc")},
        "callbacks.stop.monitor",
        {**stops_on("eval/acc/f1"), **accuracy("acc")},
    ),
    (
        "unknown-metric",
        {**stops_on("eval/loss/b"), "losses": {"a": CALLED}, "data": EVAL},
        "callbacks.stop.monitor",
        {**stops_on("eval/loss/a"), "losses": {"a": CALLED}, "data": EVAL},
    ),
    (
        "unknown-metric",
        {**stops_on("eval/acc"), **accuracy("accuracy")},
        "callbacks.stop.monitor",
        {**stops_on("eval/acc"), **accuracy("acc")},
    ),
    ("unknown-metric", stops_on("eval/loss"), "callbacks.stop.monitor", {**stops_on("eval/loss"), "data": EVAL}),
    ("unknown-metric", stops_early(), "callbacks.stop", {**stops_early(), "data": EVAL}),
    (
        "unknown-metric",
        {**stops_early(metric="acc"), **accuracy("acc")},
        "callbacks.stop.metric",
        {**stops_early(metric="eval/acc", mode="max"), **accuracy("acc")},
    ),
    ("cadence-beyond-end", {**course(max_steps=1e1), "checkpoint": {"every": 2e1}}, "checkpoint.every", {}),
    (
        "cadence-beyond-end",
        {**course(eval_every=11), "data": EVAL},
        "trainer.eval_every",
        {**course(eval_every=10), "data": EVAL},
    ),
    ("cadence-beyond-end", {"checkpoint": {"every": 11}}, "checkpoint.every", {"checkpoint": {"every": 10}}),
    (
        "nothing-saved",
        {"checkpoint": {"at_end": False}},
        "checkpoint.at_end",
        {"checkpoint": {"at_end": False, "every": 5}},
    ),
    (
        "greatest-loss",
        {"data": EVAL, "checkpoint": {"best": {"mode": "max"}}},
        "checkpoint.best.mode",
        {"data": EVAL, "checkpoint": {"best": {"mode": "min"}}},
    ),
    (
        "greatest-loss",
        {"data": EVAL, **stops_early(mode="max", metric="eval/loss")},
        "callbacks.stop.mode",
        {**stops_early(mode="max", metric="eval/acc"), **accuracy("acc")},
    ),
    (
        "memory-between-ranks",
        {"checkpoint": {"dir": "memory://c"}, "launch": {"nproc": 2}},
        "checkpoint.dir",
        {"checkpoint": {"dir": "memory://c"}, "launch": {"nproc": 1}},
    ),
    ("deepspeed-models", {**BY_DEEPSPEED, "model": None, "models": TWO, **course(step=CALLED)}, "engine", BY_DEEPSPEED),
    (
        "deepspeed-optimizer",
        {**BY_DEEPSPEED, **optimizer("Lamb", lr=0.1)},
        "optimizer.type",
        {**BY_DEEPSPEED, **optimizer("Lion", lr=0.1)},
    ),
    (
        "caller-owned-steps",
        {"deepspeed": {"managed_gradient_accumulation": False}},
        "deepspeed.managed_gradient_accumulation",
        {"deepspeed": {"managed_gradient_accumulation": True}},
    ),
    ("deepspeed-amp", {**BY_DEEPSPEED, "amp": ON}, "amp.enabled", {"amp": ON}),
    (
        "deepspeed-optimizer",
        {**BY_DEEPSPEED, "optimizer": {"_target_": "torch.optim.Muon", "lr": 0.1}},
        "optimizer._target_",
        {**BY_DEEPSPEED, "optimizer": {"_target_": "torch.optim.RAdam", "lr": 0.1}},
    ),
    ("deepspeed-mpu", {**BY_DEEPSPEED, **course(mpu=CALLED)}, "trainer.mpu", course(mpu=CALLED)),
    ("deepspeed-compile", {**BY_DEEPSPEED, "compile": ON}, "compile.enabled", {"compile": ON}),
    (
        "deepspeed-ops",
        {**BY_DEEPSPEED, "ops": {"cpu_optimizers": "require"}},
        "ops.cpu_optimizers",
        {**BY_DEEPSPEED, "ops": {"cpu_optimizers": "auto"}},
    ),
    (
        "deepspeed-ops",
        {**BY_DEEPSPEED, "ops": {"onebit": "require"}},
        "ops.onebit",
        {**BY_DEEPSPEED, "ops": {"onebit": "auto"}},
    ),
    (
        "deepspeed-ops",
        {**BY_DEEPSPEED, "ops": {"transformer": "require"}},
        "ops.transformer",
        {**BY_DEEPSPEED, "ops": {"transformer": "off"}},
    ),
    (
        "deepspeed-generation",
        {**BY_DEEPSPEED, "generation": {}, "data": EVAL, "zero_optimization": {"stage": 3}},
        "generation",
        {**BY_DEEPSPEED, "generation": {}, "data": EVAL, "zero_optimization": {"stage": 2}},
    ),
    (
        "deepspeed-fp16-stage",
        {**BY_DEEPSPEED, "fp16": ON},
        "fp16.enabled",
        {**BY_DEEPSPEED, "fp16": ON, **zero(1)},
    ),
    (
        "deepspeed-autocast",
        {**BY_DEEPSPEED, "torch_autocast": ON},
        "torch_autocast.dtype",
        {**BY_DEEPSPEED, "torch_autocast": {**ON, "dtype": "bfloat16"}},
    ),
    (
        "deepspeed-groups",
        {**BY_DEEPSPEED, **zero(3, mics_shard_size=2)},
        "zero_optimization.mics_shard_size",
        {**BY_DEEPSPEED, **zero(3, mics_shard_size=-1)},
    ),
    (
        "no-eval-data",
        {"checkpoint": {"best": {}}},
        "checkpoint.best",
        {"checkpoint": {"best": {}}, "data": {"train": {"_target_": "mine.Data"}, "eval": {"_target_": "mine.Data"}}},
    ),
    (
        "unknown-metric",
        {
            "checkpoint": {"best": {"metric": "eval/f1"}},
            "data": {"train": {"_target_": "mine.Data"}, "eval": {"_target_": "mine.Data"}},
        },
        "checkpoint.best.metric",
        {
            "checkpoint": {"best": {"metric": "eval/loss"}},
            "data": {"train": {"_target_": "mine.Data"}, "eval": {"_target_": "mine.Data"}},
        },
    ),
    (
        "secret-in-url",
        {"checkpoint": {"dir": "s3://key:secret@bucket/runs"}},
        "checkpoint.dir",
        {"checkpoint": {"dir": "s3://bucket/runs"}},
    ),
    (
        "secret-in-document",
        {"loss": {"_target_": "a.b", "options": [{"hf_token": "abc"}]}},
        "loss.options[0].hf_token",
        {"loss": {"_target_": "a.b", "hf_token": "${oc.env:HF_TOKEN}", "pad_token": "<pad>", "token": ""}},
    ),
    (
        "secret-in-document",
        {"data": {"train": {"_target_": "a.b", "password": 5}}},
        "data.train.password",
        {"data": {"train": {"_target_": "a.b", "passwords": 5}}},
    ),
    (
        "secret-in-url",
        {"data": {"train": {"_target_": "a.b", "options": ["postgresql://u:pw@h/db"]}}},
        "data.train.options[0]",
        {"data": {"train": {"_target_": "a.b", "options": ["postgresql://h/db", "${oc.env:DB}"]}}},
    ),
    (
        "secret-in-document",
        {"deepspeed": {"comet": {"api_key": "abc"}}},
        "deepspeed.comet.api_key",
        {"deepspeed": {"comet": {"api_key": "${oc.env:COMET}"}}},
    ),
    (
        "secret-in-url",
        {"monitor": {"mlflow": {"tracking_uri": "https://me:pw@host"}}},
        "monitor.mlflow.tracking_uri",
        {"monitor": {"mlflow": {"tracking_uri": "https://host"}}},
    ),
    (
        "monitor-off",
        {"monitor": {"wandb": {"project": "a"}}},
        "monitor.wandb",
        {"monitor": {"wandb": {"project": "a", "enabled": False}, "custom": {"mine": {"_target_": "a.B"}}}},
    ),
    (
        "output-not-local",
        {"monitor": {"csv_monitor": {"output_path": "s3://runs/a"}}},
        "monitor.csv_monitor.output_path",
        {"monitor": {"csv_monitor": {"output_path": "logs"}}},
    ),
    ("output-not-local", {"output": {"dir": "s3://runs/a"}}, "output.dir", {"output": {"dir": "runs/a"}}),
]
# The same for bare DeepSpeed configs: what a job has no key for, or says in other words.
CONFIGS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        "overlap-with-caller-owned-steps",
        {"managed_gradient_accumulation": False, **zero(1, overlap_comm=True)},
        "zero_optimization.overlap_comm",
        {"managed_gradient_accumulation": False, **zero(2, overlap_comm=True)},
    ),
    (
        "elasticity-with-batch",
        {"elasticity": ON, "train_batch_size": 8},
        "train_batch_size",
        {"elasticity": {"enabled": True, "ignore_non_elastic_batch_info": True}, "train_batch_size": 8},
    ),
    (
        "elasticity-with-batch",
        {"elasticity": ON, "gradient_accumulation_steps": 8},
        "gradient_accumulation_steps",
        {"elasticity": {"enabled": False}, "gradient_accumulation_steps": 8},
    ),
    (
        "elasticity-incomplete",
        {"elasticity": {"enabled": True, "max_train_batch_size": 64}},
        "elasticity",
        {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}},
    ),
    ("no-total-steps", schedule("WarmupDecayLR"), "scheduler", schedule("WarmupDecayLR", total_num_steps=9)),
    (
        "no-total-steps",
        schedule("WarmupCosineLR", total_num_steps="auto"),
        "scheduler.params.total_num_steps",
        schedule("WarmupLR"),
    ),
    ("fp16-with-bf16", {"fp16": ON, "bf16": ON}, "bf16.enabled", {"bf16": ON}),
    (
        "offload-param-stage",
        zero(1, offload_param={"device": "cpu"}),
        "zero_optimization.offload_param.device",
        zero(1, offload_param={"device": "none"}),
    ),
]


def of_rule(rule: str, found: list[Problem]) -> list[Problem]:
    return [problem for problem in found if problem.rule == rule]


def names(cases: list[tuple[str, dict[str, Any], str, dict[str, Any]]]) -> list[str]:
    return [f"{case[0]} {case[2]}" for case in cases]


@pytest.mark.parametrize(("rule", "broken", "path", "sound"), JOBS, ids=names(JOBS))
def test_a_rule_finds_what_breaks_it_and_lets_pass_what_is_near(
    rule: str, broken: dict[str, Any], path: str, sound: dict[str, Any]
) -> None:
    (found,) = of_rule(rule, check_job(make_job(**broken)))
    assert (found.dotted, found.severity) == (path, RULES[rule].severity)
    assert found.message
    assert found.hint
    assert of_rule(rule, check_job(make_job(**sound))) == []


@pytest.mark.parametrize(("rule", "broken", "path", "sound"), CONFIGS, ids=names(CONFIGS))
def test_a_rule_speaks_of_a_bare_config_in_its_own_words(
    rule: str, broken: dict[str, Any], path: str, sound: dict[str, Any]
) -> None:
    (found,) = of_rule(rule, check_config(broken))
    assert (found.dotted, found.severity) == (path, RULES[rule].bare or RULES[rule].severity)
    assert "trainer." not in found.message + found.hint
    assert of_rule(rule, check_config(sound)) == []


def test_every_rule_is_broken_above() -> None:
    assert {case[0] for case in JOBS + CONFIGS} == set(RULES)


def test_rules_of_a_whole_job_say_nothing_of_a_bare_config() -> None:
    assert {problem.rule for problem in check_config({"gradient_clipping": 1.0})} == set()
    assert {rule.id for rule in RULES.values() if rule.whole} >= {"no-end", "no-optimizer", "no-eval-data"}


def told_in_source() -> set[str]:
    """Every rule's id that a call of Problem, or one that makes problems, has as a literal anywhere in the package."""
    found = set()
    for path in Path(dsjob.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called == "Problem" and path.name != "zero_to_fp32.py":
                given = [*node.args[2:3], *(k.value for k in node.keywords if k.arg in ("rule", None))]  # None: **
                assert given, f"{path}:{node.lineno}: a problem without a rule"
                found |= {arg.value for arg in given if isinstance(arg, ast.Constant)}
            if called in ("fail", "problem") and path.parent.name == "document":
                given = [*node.args[3:4], *(k.value for k in node.keywords if k.arg == "rule")]
                found |= {arg.value for arg in given if isinstance(arg, ast.Constant)}
    return {str(rule) for rule in found}


def test_every_rule_that_is_told_anywhere_is_explained_in_a_sentence() -> None:
    told = told_in_source()
    assert {"unknown-key", "duplicate-key", "untrusted-target", "too-large", "batch"} <= told
    assert told - set(EXPLANATIONS) == set()
    for rule, reason in EXPLANATIONS.items():
        assert rule == rule.lower()
        assert reason.endswith("."), rule
        assert len(reason.split()) >= 5, rule


# ---- beside mistakes of shape


def test_rules_still_speak_of_the_sound_part_of_a_document() -> None:
    document = make_job(trainer={"micro_batch": "four", "max_steps": 10, "eval_every": 5}, nonsense=1)
    found = check_job(document)
    assert {(problem.dotted, problem.rule) for problem in found} == {
        ("trainer.micro_batch", "type"),
        ("nonsense", "unknown-key"),
        ("trainer.eval_every", "no-eval-data"),
    }


@pytest.mark.parametrize(
    "sections",
    [
        course(max_steps="ten"),  # not also: needs max_steps
        {"trainer": 5},
        {"optimizer": 5},  # not also: is missing
        {"data": {"train": {"_target_": "a.b"}, "eval": 5}, **course(eval_every=5)},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "long"}}, **optimizer("Adam", lr=0.001)},
        {"fp16": {"enabled": "true"}, "bf16": ON},
    ],
)
def test_rules_say_nothing_near_a_mistake_of_shape(sections: dict[str, Any]) -> None:
    (found,) = check_job(make_job(**sections))
    assert found.rule == "type"


def test_a_key_that_is_not_supported_has_a_shape_for_rules_to_look_at() -> None:
    found = check_job(make_job(**zero(2, zero_quantized_weights=True, offload_param={"device": "cpu"})))
    assert {problem.rule for problem in found} == {"unsupported", "offload-param-stage"}


# ---- where they are told


def test_a_rule_broken_in_the_deepspeed_section_has_its_place_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(Path("job.json"), make_job(deepspeed={"bf16": ON, "fp16": ON}))
    problems, text = validate("job.json", None)
    (found,) = of_rule("fp16-with-bf16", problems)
    lines = text["job.json"].split("\n")
    assert (found.source, lines[found.line - 1][found.column - 1 :]) == ("job.json", '"enabled": true')
    assert lines[found.line - 2].strip() == '"bf16": {'
    write_json(Path("ds.json"), {"bf16": ON, "fp16": ON})
    write_json(Path("job.json"), make_job(deepspeed="ds.json"))
    (found,) = of_rule("fp16-with-bf16", validate("job.json", None)[0])
    assert found.place == "ds.json:3:5"


def test_the_two_halves_of_a_contradiction_may_be_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(Path("ds.json"), {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 99}}})
    write_json(Path("job.json"), make_job(deepspeed="ds.json"))
    (found,) = of_rule("warmup-beyond-end", validate("job.json", None)[0])
    assert (found.place, found.severity) == ("ds.json:5:7", "warning")


def test_problems_come_once_each() -> None:
    problems = find_problems(
        make_job(deepspeed={"zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}}})
    )
    assert len({(problem.dotted, problem.rule) for problem in problems}) == len(problems)


def test_keys_that_deepspeed_is_given_have_an_effect_there() -> None:
    idle = {**zero(2, overlap_comm=True), "deepspeed": {"dump_state": True}}
    assert [p.dotted for p in of_rule("no-effect", check_job(make_job(**idle)))] == [
        "zero_optimization.overlap_comm",
        "deepspeed.dump_state",
    ]
    (found,) = of_rule("no-effect", check_job(make_job(**idle, **BY_DEEPSPEED)))
    assert found.dotted == "deepspeed.dump_state"


def test_an_automatic_length_of_a_schedule_is_told_to_have_no_meaning_in_a_program() -> None:
    (found,) = RULES["no-total-steps"].find(schedule("WarmupCosineLR", total_num_steps="auto"))
    assert found.message == '"auto" has no meaning here'
