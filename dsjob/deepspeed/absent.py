"""Names that DeepSpeed has and dsjob does not: importing them fails, with a message that says what to use instead.

Programs may test for them as usual (`hasattr`, `try: import`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from dsjob.errors import UsageError

_HERE = __package__
_PIPELINE = "pipelines are not built yet; ZeRO stage 3 spreads a model over all ranks (zero_optimization.stage: 3)"
_INFERENCE = "dsjob trains; engine.module.generate() works, and `dsjob convert --to hf` writes a folder for a server"
_EXPERTS = "expert parallelism is not built; a model with experts trains under ZeRO like any other"
_NVME = "the config's offload_optimizer section keeps optimizer state on a disk: device nvme, with nvme_path"
_OPTIMIZER = "engine.optimizer is the optimizer itself, without a wrapper; `dsjob plan` predicts the memory of a job"
_KERNELS = "use torch's own attention and layers (scaled_dot_product_attention, torch.compile: compile.enabled)"
_LAUNCHER = "start ranks with `dsjob exec`, torchrun, srun, or launch.nproc in a job document"

# What to use instead, by the name below `deepspeed`. An entry for a package applies to everything in it.
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
    "runtime.zero.stage3": _OPTIMIZER,
    "runtime.zero.stage_1_and_2": _OPTIMIZER,
    "runtime.fp16": _OPTIMIZER,
    "runtime.bf16_optimizer": _OPTIMIZER,
    "runtime.base_optimizer": _OPTIMIZER,
    "nvme": _NVME,
    "ops.sparse_attention": _KERNELS,
    "tp_model_init": "pass a model that is already divided among ranks, with an mpu: initialize(..., mpu=mpu)",
    "sequence": "sequence parallelism is not built; activation_checkpointing and ZeRO stage 3 save memory for long"
    " sequences",
    "compression": "compression is not built; convert a checkpoint and quantize its weights",
    "linear": "use adapters of peft: wrap the model before passing it to initialize",
    "autotuning": "`dsjob plan` predicts what fits, and `dsjob -m ... trainer.micro_batch=4,8` measures speed",
    "profiling": "a job's log shows samples and tokens per second; torch.profiler shows operators",
    "monitor": "engine.monitor writes to the monitors of the config: tensorboard, wandb, csv_monitor, comet",
    "elasticity": "a checkpoint resumes on any number of ranks, with the same train batch",
    "launcher.launch": _LAUNCHER,
    "launcher.multinode_runner": _LAUNCHER,
    "nebula": "checkpoint.async saves checkpoints in the background",
    "datastates": "checkpoint.async saves checkpoints in the background",
}


def describe(name: str) -> str | None:
    """What to use instead of `name` (dotted, below `deepspeed`); None if unknown."""
    parts = name.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((ALTERNATIVES[head] for head in heads if head in ALTERNATIVES), None)


def explain(name: str) -> str:
    """The message for an absent name."""
    instead = describe(name)
    return f"dsjob has no deepspeed.{name}" + (
        f": {instead}" if instead else "; docs/explanation/deepspeed-tests.md lists what it has"
    )


class AbsentNameError(UsageError, AttributeError):
    """A program uses a name of DeepSpeed that dsjob does not have."""


class AbsentModuleError(UsageError, ModuleNotFoundError):  # type: ignore[misc]  # two attributes `path`
    """A program imports a module of DeepSpeed that dsjob does not have."""


class _Explaining(MetaPathFinder):
    """The last finder on sys.meta_path: called if there is no module with that name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.startswith(f"{_HERE}."):
            # Do not set the exception's `name`: for `from ... import name`, Python would replace the message by its
            # own.
            raise AbsentModuleError(explain(fullname[len(_HERE) + 1 :]))


def explain_imports() -> None:
    """Installs the finder, once per process."""
    if not any(isinstance(finder, _Explaining) for finder in sys.meta_path):
        sys.meta_path.append(_Explaining())
