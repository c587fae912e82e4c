"""Rules about how a model computes and is spread over ranks: precision, ZeRO, offloading, batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from dsjob.contract.gpus import read_gpus
from dsjob.contract.rules.pipelines import count_stages
from dsjob.contract.rules.table import Document, Finding, enter, is_driven, is_on, read, read_offload, read_stage
from dsjob.errors import UsageError

# Types of optimizers whose step updates each parameter on its own. `optim.parts` has their classes.
STEPPED_IN_PARTS = ("adadelta", "adagrad", "adam", "adamw", "adamax", "lion", "nadam", "radam", "rmsprop", "sgd")
_MOST_PROCESSES = 8192  # on this machine: Linux has 32,768 numbers for processes by default

# Ranks


@enter("processes")
def _processes(document: Document) -> Iterator[Finding]:
    """So many processes would exhaust the memory of the machine, or the numbers that it has for processes."""
    ranks, workers = read(document, "launch.nproc", 1), read(document, "data.num_workers", 0)
    if ranks * (1 + workers) > _MOST_PROCESSES:
        found = f"{workers:,} workers on each of {ranks:,} ranks are {ranks * workers:,} processes"
        yield "data.num_workers", f"{found}, more than {_MOST_PROCESSES:,}", "lower it"


@enter("gpus")
def _gpus(document: Document) -> Iterator[Finding]:
    """launch.include and launch.exclude name GPUs of this machine, in different ways. Each rank needs its own GPU."""
    include, exclude = read(document, "launch.include"), read(document, "launch.exclude")
    if include is not None and exclude is not None:
        yield "launch.exclude", "cannot be combined with launch.include", "keep one of them"
    for key, given in (("launch.include", include), ("launch.exclude", exclude)):
        try:
            named = read_gpus(given, "the value") if isinstance(given, (str, list)) else None
        except UsageError as error:
            yield key, error.message, error.hint
            continue
        if key == "launch.exclude" and isinstance(given, str) and named is None:
            yield key, f"{given} excludes all GPUs", "name some of them, for example localhost:0"
        nproc = read(document, "launch.nproc")
        if key == "launch.include" and named is not None and isinstance(nproc, int) and nproc > len(named):
            gpus = f"{len(named)} GPU{'s' * (len(named) > 1)}"
            yield key, f"names {gpus} for {nproc} ranks (launch.nproc)", "name one for each rank"


# Accumulation


@enter("caller-owned-steps", whole=True)
def _jobs_are_managed(document: Document) -> Iterator[Finding]:
    """The training loop must know how many backward passes a step has, to split data, count samples and save."""
    if read(document, "deepspeed.managed_gradient_accumulation", True) is False:
        advice = "leave it out; for several backward passes per micro step, use trainer.step"
        yield "deepspeed.managed_gradient_accumulation", "must not be false: the training loop counts steps", advice


@enter("overlap-with-caller-owned-steps")
def _overlap_needs_a_boundary(document: Document) -> Iterator[Finding]:
    """Below stage 2, gradients are then reduced inside step, when there is no backward pass left to overlap with."""
    unmanaged = read(document, "managed_gradient_accumulation", True) is False
    if unmanaged and read(document, "zero_optimization.overlap_comm") is True and read_stage(document) < 2:
        message = "with managed_gradient_accumulation=False, overlap_comm requires ZeRO stage 2 or 3"
        yield "zero_optimization.overlap_comm", message, "leave it out"


# Precision


@enter("fp16-with-bf16")
def _one_half_precision(document: Document) -> Iterator[Finding]:
    """A model computes in one dtype. If both are enabled, it is not clear which is meant."""
    if is_on(document, "fp16") and is_on(document, "bf16"):
        yield "bf16.enabled", "is true, and so is fp16.enabled", "disable one of them"


@enter("amp-with-half-precision")
def _amp_alone(document: Document) -> Iterator[Finding]:
    """Apex's amp casts weights itself. With fp16, bf16 or ZeRO, two mechanisms would manage the same weights."""
    if is_on(document, "amp"):
        others = [f"{name}.enabled" for name in ("fp16", "bf16", "torch_autocast") if is_on(document, name)]
        others += ["zero_optimization.stage"] if read_stage(document) else []
        if others:
            hint = "use bf16 or torch_autocast instead of amp"
            yield "amp.enabled", f"cannot be combined with {' and '.join(others)}", hint


@enter("autocast-with-half-precision")
def _autocast_alone(document: Document) -> Iterator[Finding]:
    """Autocast lowers the precision of operators of an fp32 model. In a half-precision model there is nothing to lower.
    Only with bf16 masters, it serves to compute in fp32 what torch's policy wants in fp32."""
    low = read(document, "bf16.bf16_master_weights_and_grads") is True
    others = [f"{name}.enabled" for name in ("fp16", *(() if low else ("bf16",))) if is_on(document, name)]
    if is_on(document, "torch_autocast") and others:
        yield "torch_autocast.enabled", f"cannot be combined with {' and '.join(others)}", "disable one of them"


@enter("half-precision-masters")
def _masters(document: Document) -> Iterator[Finding]:
    """Half-precision masters exist for one dtype at a time, and bf16 optimizer states only with bf16 masters."""
    if read(document, "bf16.bf16_optimizer_states") and not read(document, "bf16.bf16_master_weights_and_grads"):
        yield "bf16.bf16_optimizer_states", "needs bf16.bf16_master_weights_and_grads", "enable that too"
    if read(document, "bf16.bf16_master_weights_and_grads") and read(document, "fp16.fp16_master_weights_and_grads"):
        message = "cannot be combined with bf16_master_weights_and_grads"
        yield "fp16.fp16_master_weights_and_grads", message, "keep one of the two"


@enter("bf16-masters-with")
def _bf16_masters(document: Document) -> Iterator[Finding]:
    """bf16 masters are stepped as fp32 tensors, of a rank's parts of parameters: the optimizer must update each element
    by itself. Masters on a disk, and those of fp32 models, are fp32."""
    if not read(document, "bf16.bf16_master_weights_and_grads") or read(document, "engine") == "deepspeed":
        return
    place = "bf16.bf16_master_weights_and_grads"
    if not is_on(document, "bf16"):
        yield place, "needs bf16.enabled", "enable that too, or leave this out"
    if read_offload(document, "optimizer") == "nvme" or read_offload(document, "param") == "nvme":
        yield place, "cannot be combined with state on a disk (device: nvme)", "use device: cpu"
    kind = read(document, "optimizer.type")
    if isinstance(kind, str) and kind.lower() not in STEPPED_IN_PARTS:
        yield "optimizer.type", f"{kind} cannot step bf16 masters", f"use one of {', '.join(STEPPED_IN_PARTS)}"


@enter("static-loss-scale-with-lamb")
def _lamb_scale(document: Document) -> Iterator[Finding]:
    """DeepSpeed's Lamb and OneBitLamb only support dynamic loss scaling."""
    kind = str(read(document, "optimizer.type", "")).lower()
    if kind in ("lamb", "onebitlamb") and is_on(document, "fp16") and read(document, "fp16.loss_scale", 0):
        yield "fp16.loss_scale", f"must be 0 (dynamic) with {kind}", "leave loss_scale out"


@enter("sum-in-other-precision")
def _accumulation(document: Document) -> Iterator[Finding]:
    """At stage 0, gradients are accumulated in the compute dtype or in fp32. At higher stages, they are reduced after
    each micro step, and the sums may have any dtype."""
    asked = read(document, "data_types.grad_accum_dtype")
    computes = next((name for name in ("fp16", "bf16") if is_on(document, name)), "fp32")
    if asked in ("fp16", "bf16") and asked != computes and read_stage(document) == 0:
        hint = "use fp32, or zero_optimization.stage 1 or higher"
        yield "data_types.grad_accum_dtype", f"is {asked}, but the model computes in {computes} at stage 0", hint


@enter("sum-in-half-precision-piped", severity="warning")
def _accumulation_piped(document: Document) -> Iterator[Finding]:
    """In a pipeline, all micro batches of a step are on their way together, and their gradients accumulate in fp32."""
    if read(document, "data_types.grad_accum_dtype") in ("fp16", "bf16") and count_stages(document) > 1:
        message = "has no effect in a pipeline: gradients are accumulated in fp32"
        yield "data_types.grad_accum_dtype", message, "use fp32"


@enter("predivide-stage", severity="warning")
def _predivide(document: Document) -> Iterator[Finding]:
    """From stage 1 on, FSDP2 does the division: it divides fp16 gradients in two parts so that nothing overflows.
    DeepSpeed refuses both keys there."""
    if read_stage(document) > 0:
        for key, off in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
            if read(document, key, off) != off:
                yield key, "has no effect at stages 1 to 3", "leave it out"


@enter("compressing-optimizer-stage")
def _compressing(document: Document) -> Iterator[Finding]:
    """OneBitAdam, OneBitLamb and ZeroOneAdam exchange the momenta of whole parameters instead of reduced gradients, so
    each rank must hold the whole model, as in DeepSpeed.
    """
    kind, stage = str(read(document, "optimizer.type", "")), read_stage(document)
    if kind.lower() in ("onebitadam", "onebitlamb", "zerooneadam") and stage > 0:
        yield "zero_optimization.stage", f"must be 0 with {kind}, but is {stage}", "set stage to 0, or use AdamW"


# ZeRO and offloading


@enter("offload-param-stage", bare="warning")
def _offload_param(document: Document) -> Iterator[Finding]:
    """Only stage 3 shards parameters, so only stage 3 can offload them. DeepSpeed silently ignores the key elsewhere,
    and programs rely on that (accelerate's own do), so in a bare DeepSpeed config this is a warning, and the key has no
    effect. In a job, it is an error.
    """
    if read_offload(document, "param") != "none" and read_stage(document) != 3:
        yield (
            "zero_optimization.offload_param.device",
            f"has no effect below stage 3, but the stage is {read_stage(document)}",
            "set stage to 3, or leave it out",
        )


@enter("offload-optimizer-stage")
def _offload_optimizer(document: Document) -> Iterator[Finding]:
    """At stage 0 nothing is sharded, and the optimizer state stays on the model's device."""
    if read_offload(document, "optimizer") != "none" and read_stage(document) == 0:
        yield (
            "zero_optimization.offload_optimizer.device",
            "needs stage 1, 2 or 3, but the stage is 0",
            "for example, set stage to 2",
        )


@enter("nvme-stage")
def _nvme_stage(document: Document) -> Iterator[Finding]:
    """DeepSpeed can swap optimizer state to NVMe disks only at stage 3, which is also the only stage that offloads
    parameters. dsjob's own engine can at stages 1 to 3."""
    if is_driven(document) and read_offload(document, "optimizer") == "nvme" and read_stage(document) in (1, 2):
        yield (
            "zero_optimization.offload_optimizer.device",
            f"nvme needs stage 3 with engine: deepspeed, but the stage is {read_stage(document)}",
            "use engine: dsjob, stage 3, or cpu",
        )


@enter("nvme-path")
def _nvme_path(document: Document) -> Iterator[Finding]:
    """What is kept on a disk needs a folder there. There is no default, because only you know which disk is local,
    fast and has room."""
    for kind in ("param", "optimizer"):
        section = f"zero_optimization.offload_{kind}"
        if read_offload(document, kind) != "nvme":
            continue
        path = read(document, f"{section}.nvme_path")
        if path is None:
            hint = "set nvme_path to a folder on a local disk, or use cpu"
            yield f"{section}.device", "nvme needs nvme_path, which is not set", hint
        elif isinstance(path, str) and "://" in path:
            message = f"{path} is a URL, but the file must be on this machine"
            yield f"{section}.nvme_path", message, "name a folder on a local disk"


@enter("nvme-optimizer")
def _nvme_optimizer(document: Document) -> Iterator[Finding]:
    """Only a part of what is on a disk is in memory at a time, so the optimizer must update each parameter on its own.
    Lamb, Muon and LBFGS need all of them at once."""
    kind = read(document, "optimizer.type")
    on_disk = [name for name in ("optimizer", "param") if read_offload(document, name) == "nvme"]
    if is_driven(document) or not on_disk or not isinstance(kind, str):
        return
    if kind.lower() not in STEPPED_IN_PARTS:
        what = "its state" if on_disk[0] == "optimizer" else "parameters"
        yield (
            f"zero_optimization.offload_{on_disk[0]}.device",
            f"{kind} cannot step {what} from a disk, part by part",
            f"use cpu, or one of these optimizers: {', '.join(STEPPED_IN_PARTS)}",
        )


@enter("offload-ratio-stage")
def _offload_ratio(document: Document) -> Iterator[Finding]:
    """Only stage 3 can offload a part of the optimizer state."""
    if read(document, "zero_optimization.offload_optimizer.ratio", 1) < 1 and read_stage(document) != 3:
        yield (
            "zero_optimization.offload_optimizer.ratio",
            f"below 1 needs stage 3, but the stage is {read_stage(document)}",
            "leave it out",
        )


@enter("mics-stage")
def _mics(document: Document) -> Iterator[Finding]:
    """MiCS and hpZ, in which groups of ranks hold a whole model, are variants of stage 3."""
    for key, off in (("mics_shard_size", -1), ("zero_hpz_partition_size", 1)):
        if read(document, f"zero_optimization.{key}", off) not in (off, 0) and read_stage(document) != 3:
            yield (
                f"zero_optimization.{key}",
                f"needs stage 3, but the stage is {read_stage(document)}",
                "set stage to 3, or leave it out",
            )


@enter("odd-allgather-bucket", severity="warning")
def _odd_bucket(document: Document) -> Iterator[Finding]:
    """DeepSpeed refuses an odd allgather_bucket_size at the start, because its buffers are aligned."""
    size = read(document, "zero_optimization.allgather_bucket_size", 0)
    if isinstance(size, (int, float)) and size % 2:
        yield "zero_optimization.allgather_bucket_size", f"{size} is odd, which DeepSpeed refuses", "make it even"


@enter("contiguous-checkpointing")
def _contiguous(document: Document) -> Iterator[Finding]:
    """The layout of activation checkpoints in one buffer depends on their partitions and on their number."""
    section = read(document, "activation_checkpointing", {})
    if section.get("contiguous_memory_optimization") is True:
        place = "activation_checkpointing.contiguous_memory_optimization"
        if section.get("partition_activations") is not True:
            yield place, "needs partition_activations", "enable partition_activations, or disable this"
        if not section.get("number_checkpoints"):
            hint = "set it to the number of checkpoints, usually the number of the model's layers"
            yield place, "needs number_checkpoints", hint


@enter("selective-with-autocast")
def _selective_units(document: Document) -> Iterator[Finding]:
    """Under torch_autocast at stages 1 to 3, each safe module is gathered separately. The operators of this gathering
    mix with those of the block, and a policy that decides by operator cannot tell which to recompute."""
    selective = read(document, "activation_checkpointing.mode") == "selective"
    if selective and is_on(document, "torch_autocast") and read_stage(document) > 0:
        place = "activation_checkpointing.mode"
        message = f"selective cannot be combined with torch_autocast at stage {read_stage(document)}"
        yield place, message, "use full, or bf16"


@enter("selective-compiled")
def _selective_compiled(document: Document) -> Iterator[Finding]:
    """The compiler must see the policy that selects operators, and everything around it, but it cannot see how inputs
    are kept."""
    section = read(document, "activation_checkpointing", {})
    if section.get("mode") == "selective" and is_on(document, "compile"):
        for key in (
            "cpu_checkpointing",
            "partition_activations",
            "synchronize_checkpoint_boundary",
            "profile",
        ):
            if section.get(key) is True:
                message = "cannot be combined with mode selective and compile"
                yield f"activation_checkpointing.{key}", message, "use mode full"


@enter("checkpointing-without-mode", severity="warning")
def _checkpointing_mode(document: Document) -> Iterator[Finding]:
    """DeepSpeed's keys have no effect on their own: either the model passes the parts to recompute, or a mode makes
    its blocks recompute."""
    section = read(document, "activation_checkpointing", {})
    if section.get("mode", "none") != "none":
        return
    if section.get("interval", 1) != 1:
        yield "activation_checkpointing.interval", "selects blocks, but mode is none", "add mode: full"
    for key in ("partition_activations", "cpu_checkpointing"):
        if section.get(key) is True:
            message = "only applies to what the model passes to dsjob.checkpointing.checkpoint, because mode is none"
            yield f"activation_checkpointing.{key}", message, "to apply it to the model's blocks, add mode: full"
            return


@enter("compile-mode")
def _compile_mode(document: Document) -> Iterator[Finding]:
    """Only inductor has modes. Another compiler fails in the first step."""
    mode, backend = read(document, "compile.mode", "default"), read(document, "compile.backend", "inductor")
    if is_on(document, "compile") and mode != "default" and backend != "inductor":
        yield "compile.mode", f"{mode} is a mode of inductor, not of {backend}", "leave mode out"


# Batch sizes

_TRIAD = {
    "trainer.train_batch": "train_batch_size",
    "trainer.micro_batch": "train_micro_batch_size_per_gpu",
    "trainer.grad_accum": "gradient_accumulation_steps",
}


@enter("elasticity-with-batch")
def _elasticity(document: Document) -> Iterator[Finding]:
    """Elasticity chooses the batch sizes and would ignore given ones, so DeepSpeed refuses this combination."""
    if is_on(document, "elasticity") and not read(document, "elasticity.ignore_non_elastic_batch_info"):
        for place, name in _TRIAD.items():
            if read(document, place) is not None:
                yield place, f"is set, but elasticity chooses {name}", "leave one of the two out"


@enter("elasticity-incomplete")
def _elasticity_keys(document: Document) -> Iterator[Finding]:
    """Elasticity computes the batch sizes from the largest train batch and a list of micro batches."""
    if is_on(document, "elasticity"):
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if read(document, f"elasticity.{key}") is None:
                yield "elasticity", f"needs {key}", ""
