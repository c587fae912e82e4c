"""accelerate's files and the options of `accelerate launch`, as values of the job document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from dsjob.contract.hints import suggest
from dsjob.contract.paths import Path
from dsjob.importing.given import Draft, Given, Rank, Settings, is_off
from dsjob.importing.training_arguments import draft_fsdp_config, draft_sharding

_ZERO = "zero_optimization"
_NODES = "start dsjob with torchrun on each machine, which sets it"
# Keys whose values are copied as they are. Keys inside sections are listed without the section.
PATHS = {
    "gradient_accumulation_steps": "trainer.grad_accum",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": f"{_ZERO}.stage",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "dynamo_mode": "compile.mode",
    "dynamo_use_dynamic": "compile.dynamic",
    "dynamo_use_fullgraph": "compile.fullgraph",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
# Keys that the functions in this module translate.
READ = {
    "num_processes": "launch.nproc",
    "num_machines": "launch.nproc",
    "mixed_precision": "fp16.enabled bf16.enabled",
    "use_cpu": "launch.device",
    "cpu": "launch.device",
    "distributed_type": "launch.device",
    "gpu_ids": "launch.include",
    "deepspeed_config": _ZERO,
    "deepspeed_config_file": "",
    "fsdp_config": f"{_ZERO}.stage",
    "dynamo_config": "",
    "dynamo_backend": "compile.enabled compile.backend",
}
# Keys that are left out: why, and values that need no note.
LEFT_OUT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "compute_environment": ("a job runs on the machine where it is started", ("LOCAL_MACHINE",)),
    "machine_rank": (_NODES, (0,)),
    "main_process_ip": (_NODES, ()),
    "main_process_port": (_NODES, ()),
    "rdzv_backend": (_NODES, ("static", "c10d")),
    "same_network": (_NODES, (True,)),
    "main_training_function": ("the job document defines what to run", ("main",)),
    "downcast_bf16": ("dsjob does not support TPUs", ("no",)),
    "debug": ("dsjob --debug shows tracebacks", ()),
    "enable_cpu_affinity": ("bind ranks with numactl", ()),
    "num_cpu_threads_per_process": ("set OMP_NUM_THREADS", ()),
    "zero3_init_flag": ("dsjob decides how the model is built", ()),
    "deepspeed_hostfile": (_NODES, ()),
    "deepspeed_multinode_launcher": (_NODES, ("standard",)),
    "deepspeed_inclusion_filter": ("set launch.include on each machine", ()),
    "deepspeed_exclusion_filter": ("set launch.exclude on each machine", ()),
    "deepspeed_moe_layer_cls_names": ("dsjob finds the blocks itself", ()),
    "dynamo_use_regional_compilation": ("blocks are compiled one by one", ()),
    "megatron_lm_config": ("set tensor_parallel.size and pipeline.stages", ()),
    "parallelism_config": ("set tensor_parallel.size and context_parallel.size", ()),
    "fp8_config": ("8-bit floats are not supported: use bf16.enabled=true", ()),
    "ipex_config": ("dsjob has no such backend", ()),
    "mpirun_config": (_NODES, ()),
    "tpu_env": ("dsjob does not support TPUs", ()),
    "tpu_use_cluster": ("dsjob does not support TPUs", ()),
    "tpu_use_sudo": ("dsjob does not support TPUs", ()),
    "tpu_name": ("dsjob does not support TPUs", ()),
    "tpu_zone": ("dsjob does not support TPUs", ()),
    "command_file": ("a job runs on the machine where it is started", ()),
    "commands": ("a job runs on the machine where it is started", ()),
    "module": ("the job document defines what to run", (True,)),
    "no_python": ("the job document defines what to run", (True,)),
    "quiet": ("dsjob has its own console output", (True,)),
    "max_restarts": ("start the job again, and it resumes", ()),
}  # fmt: skip
_SWITCHES = (
    "multi_gpu",
    "use_deepspeed",
    "use_fsdp",
)  # options of the command that enable features with options of their own
KEYS = frozenset({*PATHS, *READ, *LEFT_OUT})
_SECTIONS = ("deepspeed_config", "dynamo_config", "fsdp_config")
_DEVICES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
_OTHERS = (  # other devices and strategies of accelerate
    "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU",
)  # fmt: skip
_DIVIDED = {"MEGATRON_LM": "tensor_parallel.size and pipeline.stages", "TP": "tensor_parallel.size"}


def read_settings(content: dict[str, Any], locate: Callable[[Path], str], draft: Draft) -> Iterator[tuple[str, Given]]:
    """A file's keys as settings. Keys inside sections are listed by their own names, without the section."""
    for key, value in content.items():
        given = Given(value, key, locate((key,)), Rank.ACCELERATE)
        if key not in _SECTIONS:
            yield key, given
        elif isinstance(value, dict):
            for name, item in value.items():
                yield name, Given(item, name, locate((key, name)), Rank.ACCELERATE)
        elif value is not None:
            draft.refuse(given, "must be an object with accelerate's keys")


def draft_accelerate(settings: Settings, draft: Draft) -> None:
    """Adds accelerate's settings to the draft. The caller handles names of other files."""
    for name, given in settings.items():
        if name in PATHS:
            if given.value is not None and not (name.startswith("offload") and given.value == "none"):
                draft.put(PATHS[name], given)
        elif name in LEFT_OUT:
            about, silent = LEFT_OUT[name]
            if not is_off(given.value) and given.value not in silent:
                draft.note("left out", f"{given.label}: {about}", given)
        elif not name.startswith("fsdp_") and name not in READ and name not in (*_SWITCHES, "config_file"):
            hint = suggest(name, sorted(KEYS)) or "unknown key of accelerate"
            draft.note("unknown", f"{given.label}: {hint}", given)
    _draft_processes(settings, draft)
    _draft_device(settings, draft)
    _draft_precision(settings.get("mixed_precision"), draft)
    compiler = settings.get("dynamo_backend")
    if compiler is not None and not is_off(compiler.value):
        draft.put("compile.enabled", compiler.to(True))
        draft.put("compile.backend", compiler.to(str(compiler.value).lower()))
    fsdp = {name: given for name, given in settings.items() if name.startswith("fsdp_") and name not in _SECTIONS}
    if fsdp:
        _draft_fsdp(fsdp, draft)


def _draft_processes(settings: Settings, draft: Draft) -> None:
    processes, machines = settings.get("num_processes"), settings.get("num_machines")
    nodes = draft.whole(machines, 1) if machines is not None and machines.value is not None else 1
    if processes is not None and processes.value is not None:
        count = draft.whole(processes, 1)
        draft.put("launch.nproc", processes.to(max(1, count // nodes)))
        if count % nodes:
            draft.refuse(processes, f"cannot be divided among {nodes} machines", rule="range")
    if machines is not None and nodes > 1:
        draft.nodes = nodes
        text = f"{machines.label}: start dsjob with torchrun on each machine; launch.nproc counts ranks per machine"
        draft.note("left out", text, machines)
    gpus = settings.get("gpu_ids")
    if gpus is not None and gpus.value is not None and gpus.value not in ("all", ""):
        if re.fullmatch(r"\d+(,\d+)*", str(gpus.value)):
            draft.put("launch.include", gpus.to(f"localhost:{gpus.value}"))
        else:  # names, such as GPU-5ebe9f43
            draft.note("left out", f"{gpus.label}: set CUDA_VISIBLE_DEVICES={gpus.value}", gpus)


def _draft_device(settings: Settings, draft: Draft) -> None:
    for name in ("use_cpu", "cpu"):
        if name in settings and draft.switch(settings[name]):
            draft.put("launch.device", settings[name].to("cpu"))
    kind = settings.get("distributed_type")
    if kind is None or is_off(kind.value) or kind.value in _DEVICES:
        if kind is not None and kind.value == "MULTI_CPU":
            draft.put("launch.device", kind.to("cpu"))
    elif isinstance(kind.value, str) and kind.value in _DIVIDED:
        draft.note("left out", f"{kind.label}: set {_DIVIDED[kind.value]}", kind)
    elif kind.value in _OTHERS:
        draft.note("left out", f"{kind.label}: dsjob runs on CPU or CUDA", kind)
    else:
        allowed = (*_DEVICES, *_OTHERS, *_DIVIDED)
        hint = suggest(str(kind.value), allowed)
        draft.refuse(kind, f"must be one of {', '.join(allowed)}", rule="enum", hint=hint)


def _draft_precision(given: Given | None, draft: Draft) -> None:
    if given is None or is_off(given.value):
        return
    if given.value == "fp8":
        draft.note("left out", f"{given.label}: 8-bit floats are not supported; use bf16.enabled=true", given)
    elif given.value in ("fp16", "bf16"):
        draft.put(f"{given.value}.enabled", given.to(True))
    else:
        hint = suggest(str(given.value), ["fp16", "bf16", "no"])
        draft.refuse(given, "must be one of no, fp16, bf16, fp8", rule="enum", hint=hint)


_STRATEGIES = {1: "full_shard", 2: "shard_grad_op", 3: "no_shard", 4: "hybrid_shard", 5: "hybrid_shard_zero2"}


def _draft_fsdp(config: Settings, draft: Draft) -> None:
    rest = {name: given for name, given in config.items() if given.value is not None}
    strategy, offload = rest.pop("fsdp_sharding_strategy", None), rest.pop("fsdp_offload_params", None)
    reshard = rest.get("fsdp_reshard_after_forward")
    # People also write FSDP1's strategies under this key of FSDP2.
    if reshard is not None and str(reshard.value).lower() in _STRATEGIES.values():
        rest.pop("fsdp_reshard_after_forward")
        strategy = reshard
    if strategy is not None:
        number = strategy.value if isinstance(strategy.value, int) else 0
        word = _STRATEGIES.get(number, strategy.value) if number is not True else strategy.value
        draft_sharding([str(word).lower()], strategy, draft)
    elif reshard is None:
        first = next(iter(config.values()))
        draft_sharding(["full_shard"], Given("full_shard", "FSDP", first.place, first.rank), draft)
    draft_fsdp_config(rest, draft)
    if offload is not None and draft.switch(offload):
        stage = draft.best("zero_optimization.stage")
        draft.put(f"{_ZERO}.offload_optimizer.device", offload.to("cpu"))
        if stage is None or stage.value == 3:
            draft.put(f"{_ZERO}.offload_param.device", offload.to("cpu"))
