"""Names that DeepSpeed has and dsjob does not: importing them fails, with a message that says what to use instead.

Programs may test for them as usual (`hasattr`, `try: import`).
"""

from __future__ import annotations

import difflib
import dis
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import FrameType, ModuleType
from typing import Any, NoReturn

from dsjob.errors import UsageError

_HERE = __package__
_ALIAS = "deepspeed"  # under `dsjob exec`
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_INFERENCE = "dsjob trains; engine.module.generate() works, and `dsjob convert --to hf` writes a folder for a server"
_DIVIDED = "set tensor_parallel.autotp_size in the config: initialize divides the model's layers"
_EXPERTS = "expert parallelism is not built; a model with experts trains under ZeRO like any other"
_NVME = "the config's offload_optimizer and offload_param sections keep state on a disk: device nvme, with nvme_path"
_OPTIMIZER = "engine.optimizer is the optimizer itself, without a wrapper; `dsjob plan` predicts the memory of a job"
_KERNELS = "use torch's own attention and layers (scaled_dot_product_attention, torch.compile: compile.enabled)"
_SEQUENCE = "set sequence_parallel_size in the config: initialize divides the model's sequences"
_COLLECTIVES = "torch.profiler shows collectives and their times"
_NVTX = "torch.profiler.record_function names a part of a program in traces"
_DENSE = "gradients are always reduced as dense tensors"
_COMPRESSION = "compression is not built; convert a checkpoint and quantize its weights"
_LAUNCHER = "start ranks with `dsjob exec`, torchrun, srun, or launch.nproc in a job document"

# What to use instead, by the name below `deepspeed`. An entry for a package applies to everything in it.
ALTERNATIVES = {
    "init_inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "inference": _INFERENCE,
    "model_implementations": _INFERENCE,
    "module_inject.replace_module": _INFERENCE,
    "module_inject.containers": _INFERENCE,
    "module_inject.policy": _INFERENCE,
    "module_inject.replace_policy": _INFERENCE,
    "module_inject.load_checkpoint": _INFERENCE,
    "module_inject.auto_tp": _DIVIDED,
    "module_inject.tp_shard": _DIVIDED,
    "module_inject.autotp_config": _DIVIDED,
    "default_inference_config": _INFERENCE,
    "add_tuning_arguments": "schedules are set in the config's scheduler section",
    "DeepSpeedHybridEngine": _INFERENCE,
    "runtime.hybrid_engine": _INFERENCE,
    "moe.layer": _EXPERTS,
    "moe.experts": _EXPERTS,
    "moe.sharded_moe": _EXPERTS,
    "moe.mappings": _EXPERTS,
    "runtime.sequence_parallel": _SEQUENCE,
    "runtime.tensor_parallel": _DIVIDED,
    "runtime.sparse_tensor": _DENSE,
    "runtime.compiler": "use torch.compiler; engine.compile() and compile.enabled in the config compile the model",
    "runtime.constants": "write the keys as strings; docs/reference/deepspeed.md lists them",
    "runtime.dataloader.DeepSpeedDataLoader": "engine.deepspeed_io(dataset) returns a loader",
    "comm.log_summary": _COLLECTIVES,
    "comm.configure": _COLLECTIVES,
    "comm.initialize_mesh_device": "use torch.distributed.device_mesh.init_device_mesh",
    "utils.timer.SynchronizedWallClockTimer": "wall_clock_breakdown in the config prints the times of a step's parts",
    "utils.nvtx": _NVTX,
    "ops.op_builder.UtilsBuilder": "parameters are not flattened; torch._utils has _flatten_dense_tensors",
    "runtime.swap_tensor": _NVME,
    "runtime.zero.stage3": _OPTIMIZER,
    "runtime.zero.stage_1_and_2": _OPTIMIZER,
    "runtime.fp16": _OPTIMIZER,
    "runtime.bf16_optimizer": _OPTIMIZER,
    "runtime.base_optimizer": _OPTIMIZER,
    "nvme": _NVME,
    "ops.sparse_attention": _KERNELS,
    "sequence": _SEQUENCE,
    "compression.compress": _COMPRESSION,
    "compression.init_compression": _COMPRESSION,
    "compression.redundancy_clean": _COMPRESSION,
    "linear": "use adapters of peft: wrap the model before passing it to initialize",
    "autotuning": "`dsjob plan` predicts what fits, and `dsjob -m ... trainer.micro_batch=4,8` measures speed",
    "profiling.config": "the config's flops_profiler section is checked by initialize",
    "elasticity.elastic_agent": "a checkpoint resumes on any number of ranks; dsjob and torchrun restart ranks",
    "launcher.launch": _LAUNCHER,
    "launcher.multinode_runner": _LAUNCHER,
    "launcher.runner.main": _LAUNCHER,
    "launcher.runner.fetch_hostfile": _LAUNCHER,
    "checkpoint.DeepSpeedCheckpoint": "`dsjob ckpt` and `dsjob convert` read DeepSpeed's checkpoints",
    "ops.adam.ZenFlowCPUAdam": "ZenFlow is not built; use DeepSpeedCPUAdam",
    "ops.adam.ZenFlowSelectiveAdamW": "ZenFlow is not built; use FusedAdam",
    "ops.transformer.DeepSpeedTransformerInference": _INFERENCE,
    "moe.utils.split_params_into_shared_and_expert_params": _EXPERTS,
    "moe.utils.has_moe_layers": _EXPERTS,
    "runtime.utils.get_global_norm": "engine.get_global_grad_norm() gives the norm of the last step",
    "runtime.utils.DummyOptim": "initialize without an optimizer needs none",
    "utils.instrument_w_nvtx": _NVTX,
    "nebula": "checkpoint.async saves checkpoints in the background",
    "datastates": "checkpoint.async saves checkpoints in the background",
}


def describe(name: str) -> str | None:
    """What to use instead of `name` (dotted, below `deepspeed`); None if unknown."""
    parts = name.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((ALTERNATIVES[head] for head in heads if head in ALTERNATIVES), None)


def explain(name: str, *, imports: bool = False) -> str:
    """The message for an absent name. imports: it would be a module."""
    instead = describe(name) or _find_similar(*name.rpartition(".")[::2], imports)
    return f"dsjob has no deepspeed.{name}" + (
        f": {instead}" if instead else "; docs/explanation/deepspeed-tests.md lists what it has"
    )


def _find_similar(module: str, name: str, imports: bool) -> str | None:
    """The module that has `name`, or a name of `module` that is spelt like it, or `module` if it is no package here."""
    loaded = {each: vars(found) for each, found in sys.modules.items() if each == _HERE or each.startswith(f"{_HERE}.")}
    homes = [each for each, names in loaded.items() if getattr(names.get(name), "__module__", None) == each]
    if homes:
        return f"it is deepspeed{homes[0].removeprefix(str(_HERE))}.{name}"
    known = loaded.get(f"{_HERE}.{module}" if module else str(_HERE), {})
    spelt = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=1, cutoff=0.8)
    if spelt:
        return f"did you mean {spelt[0]}?"
    return f"its names are in deepspeed.{module}" if imports and known.get("__path__") == [] else None


class AbsentNameError(UsageError, AttributeError):
    """A program uses a name of DeepSpeed that dsjob does not have."""


class AbsentImportError(UsageError, ImportError):  # type: ignore[misc]  # two attributes `path`
    """A program imports a name of DeepSpeed that dsjob does not have, from a module that it has."""


class AbsentModuleError(UsageError, ModuleNotFoundError):  # type: ignore[misc]  # two attributes `path`
    """A program imports a module of DeepSpeed that dsjob does not have."""


class _Explaining(MetaPathFinder):
    """The last finder on sys.meta_path: called if there is no module with that name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        homes = [name for name in (_HERE, _ALIAS) if sys.modules.get(name) is sys.modules[str(_HERE)]]
        below = next((fullname[len(name) + 1 :] for name in homes if fullname.startswith(f"{name}.")), "")
        if below and not _is_asked():
            # Do not set the exception's `name`: for `from ... import name`, Python would replace the message by its
            # own.
            raise AbsentModuleError(explain(below, imports=not _is_from_import()))


def _is_asked() -> bool:
    """Whether a finder is called by `importlib.util.find_spec`, which returns None for what is not there."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_find_spec":
        frame = frame.f_back
    caller = frame and frame.f_back
    return caller is not None and caller.f_code.co_filename == "<frozen importlib.util>"


def _is_from_import() -> bool:
    """Whether a finder is called for `from package import name`, where the name may also be no module."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen importlib", _OURS)):
        if frame.f_code.co_name == "_handle_fromlist":
            return True
        frame = frame.f_back
    return False


def _find_nothing(name: str) -> NoReturn:
    raise AttributeError(name)


def explain_names(module: str, find: Callable[[str], Any] = _find_nothing) -> Callable[[str], Any]:
    """The `__getattr__` of a module of dsjob.deepspeed: imports a module below it, and raises the message of `explain`
    for a name that neither the module nor `find` has.

    `from module import name` would replace the message of an AttributeError by Python's own, so it gets an ImportError.
    """
    below = module[len(str(_HERE)) + 1 :]

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        with suppress(AttributeError):
            return find(name)
        if f"{module}.{name}" in _also_named:
            return sys.modules[module]
        # DeepSpeed imports its modules itself, so programs read them as attributes.
        if PathFinder.find_spec(f"{module}.{name}", getattr(sys.modules[module], "__path__", ())):
            return import_module(f"{module}.{name}")
        message = explain(f"{below}.{name}" if below else name)
        here = inspect.currentframe()
        raise AbsentImportError(message) if _imports(here and here.f_back) else AbsentNameError(message)

    return __getattr__


def _imports(frame: FrameType | None) -> bool:
    """Whether `frame` is at the part of `from module import name` that reads the name."""
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def stand_for(module: str, *names: str) -> list[str]:
    """Makes DeepSpeed's modules `names`, below a module, the module itself.

    Returns a `__path__` for a module that is no package: Python then looks for modules below it, and the finder
    explains those that are missing.
    """
    for name in names:
        sys.modules[f"{module}.{name}"] = sys.modules[module]
        _also_named.add(f"{module}.{name}")
    return []


_also_named: set[str] = set()


def explain_imports() -> None:
    """Installs the finder, once per process."""
    if not any(isinstance(finder, _Explaining) for finder in sys.meta_path):
        sys.meta_path.append(_Explaining())
