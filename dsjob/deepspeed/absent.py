"""What DeepSpeed has and dsjob has not: whoever asks for it is told what to use instead.

A program may look first (`hasattr`, `try: import`): names are absent as any others are, with a message of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_HERE = __package__
_PIPELINE = "pipelines are not built yet; ZeRO stage 3 spreads a model over all ranks (zero_optimization.stage: 3)"
_INFERENCE = "dsjob trains; engine.module.generate() works, and `dsjob convert --to hf` writes a folder for a server"
_EXPERTS = "experts on ranks of their own are not built; a model with experts trains under ZeRO as any other"
_NVME = "offloading to NVMe is not built; offload_optimizer and offload_param take device: cpu"
_KERNELS = "torch's own attention and layers are used (scaled_dot_product_attention, torch.compile: compile.enabled)"

# What to do instead, by the name below `deepspeed`; what stands for a package stands for what is in it.
ALTERNATIVES = {
    "pipe": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "runtime.pipe": _PIPELINE,
    "init_inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "inference": _INFERENCE,
    "model_implementations": _INFERENCE,
    "module_inject": _INFERENCE,
    "default_inference_config": _INFERENCE,
    "add_tuning_arguments": "schedules are set in the config's scheduler section",
    "DeepSpeedHybridEngine": _INFERENCE,
    "runtime.hybrid_engine": _INFERENCE,
    "moe.layer": _EXPERTS,
    "moe.experts": _EXPERTS,
    "moe.sharded_moe": _EXPERTS,
    "runtime.swap_tensor": _NVME,
    "nvme": _NVME,
    "ops.transformer": _KERNELS,
    "ops.sparse_attention": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "DeepSpeedTransformerConfig": _KERNELS,
    "tp_model_init": "give a model whose ranks hold parts of it together with an mpu: initialize(..., mpu=mpu)",
    "sequence": "sequence parallelism is not built; activation_checkpointing and ZeRO stage 3 make room for long texts",
    "compression": "compression is not built; convert a checkpoint and quantize its weights",
    "linear": "adapters are those of peft, around the model before it is given to initialize",
    "autotuning": "`dsjob plan` says what fits, and `dsjob -m ... trainer.micro_batch=4,8` measures",
    "profiling": "a job's log has samples and tokens a second; torch.profiler shows operators",
    "monitor": "metrics.jsonl in a run's folder holds every record",
    "elasticity": "a checkpoint resumes on any number of ranks, at the same train batch",
    "launcher": "start ranks with torchrun, srun, or launch.nproc of a job document",
    "nebula": "checkpoints are saved in the background by checkpoint.async",
    "datastates": "checkpoints are saved in the background by checkpoint.async",
    "checkpoint": "checkpoints of dsjob load at any stage and world size; `dsjob convert` makes other forms of them",
}


def describe(name: str) -> str | None:
    """What to do instead of `name`, dotted below `deepspeed`; None for what is not known."""
    parts = name.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((ALTERNATIVES[head] for head in heads if head in ALTERNATIVES), None)


def explain(name: str) -> str:
    """A message for whoever asks for `name`."""
    instead = describe(name)
    return f"dsjob has no deepspeed.{name}" + (
        f": {instead}" if instead else "; docs/explanation/deepspeed-tests.md lists what it has"
    )


class _Explaining(MetaPathFinder):
    """Asked last, when there is no module of that name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.startswith(f"{_HERE}."):
            # Without `name`: where it is that of a name in `from ... import name`, Python puts its own message instead.
            raise ModuleNotFoundError(explain(fullname[len(_HERE) + 1 :]))


def explain_imports() -> None:
    """Lets an import of what is not below this package say so; once a process."""
    if not any(isinstance(finder, _Explaining) for finder in sys.meta_path):
        sys.meta_path.append(_Explaining())
