"""Plans a composed job: predicts memory, communication, checkpoint sizes and steps. Starts no ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

from dsjob.contract.job_lengths import describe_lengths
from dsjob.contract.precisions import Dtype
from dsjob.contract.sharding import LEAST_IN_SHARES, builds_in_shares
from dsjob.contract.spec import JobSpec, view
from dsjob.document.origins import Composed
from dsjob.document.resolve import resolve_job
from dsjob.document.sizes import choose_world_size
from dsjob.errors import DataError, UsageError
from dsjob.front.check import check_composed
from dsjob.front.places import placing_errors
from dsjob.front.unnamed import complete
from dsjob.launch import launcher
from dsjob.launch.rank import add_import_folders
from dsjob.planning.communication import predict_checkpoint, predict_communication
from dsjob.planning.fit import Job
from dsjob.planning.model import COMPRESSING, MASTER_SIZE, Layout, Model, Offload, OptimizerState, assume_state
from dsjob.planning.report import Activations, Course, Plan, Share, find_largest
from dsjob.planning.shapes import assume_model
from dsjob.trust.grant import Trust
from dsjob.trust.named import name_places

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_PLOT_WIDTH = 61


@dataclass(frozen=True)
class Asked:
    """What to plan for. `params`: a number of parameters instead of the model. Memory is in bytes."""

    params: int | None = None
    world_size: int | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    offload: Offload | None = None


def parse_parameters(text: str) -> int:
    """The number that 7e9, 7B, 350M or 124000000 stands for. Raises UsageError."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper())
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e16:
        raise UsageError(f"{text!r} is not a number of parameters: write 7e9, 7B or 350M")
    return round(number)


def plan_composed(composed: Composed, asked: Asked, trust: Trust) -> Plan:
    """The plan of a composed document. Raises DocumentError, UsageError."""
    given = composed.document
    world_size, ranks_from = choose_world_size(
        given, composed.locate, asked=asked.world_size, started=launcher.read_world_size()
    )
    if given.get("models") and asked.params is None:
        raise UsageError(
            f"a plan is for one model, and the document has {len(given['models'])}",
            hint="--params N plans for N parameters",
        )
    if asked.params is not None:  # nothing is imported
        given = complete(given, micro_batch=1)
        resolved = resolve_job(given, world_size=world_size, locate=composed.locate, ranks_from=ranks_from)
    else:
        resolved = check_composed(composed, trust, world_size=world_size, ranks_from=ranks_from).require()
    add_import_folders(trust.importable)
    with placing_errors(composed):
        return _make_plan(resolved.document, world_size, asked, name_places(trust, composed))


def _make_plan(document: dict[str, Any], world_size: int, asked: Asked, trust: Trust) -> Plan:
    spec = view(JobSpec, document)
    world_size //= spec.model_ranks
    layout = _read_layout(spec, world_size, asked.offload)
    notes: list[str] = []
    if asked.params is not None:
        model, state, shares, course = _count(spec, asked.params, layout, notes)
    else:
        model, state, shares, course = _look(spec, layout, notes, trust)
    if spec.optimizer and (spec.optimizer.type or "").lower() in COMPRESSING and world_size > 1:
        notes.append("optimizer state is as after the freeze step; from then on, 1/32 of the all-reduce bytes are sent")
    if spec.trainer.model_parallel_size > 1:
        notes.append("the model is assumed to be the part of one model-parallel rank; ranks are data-parallel ranks")
    if spec.pipeline.size > 1:
        notes.append("--schedule shows the timeline of the stages")
    if spec.pipeline.partition.lower() == "time":
        notes.append("pipeline.partition time: a plan measures no times, and divides layers by parameters")
    if spec.pipeline.activation_checkpoint_interval:
        notes.append("pipeline.activation_checkpoint_interval: activations are counted as if nothing was recomputed")
    if spec.driven:
        notes.append("engine: deepspeed: all figures are of dsjob's own engine; DeepSpeed's buckets and copies differ")
    if spec.torch_autocast.enabled:
        notes.append("torch_autocast: activations are counted as fp32, and are smaller")
    if layout.stage and world_size == 1 and layout.offload == "none":
        notes.append(f"stage {layout.stage} on one rank: nothing to shard")
    jobs = tuple(_make_job(share, layout, state) for share in shares)
    most = find_largest(jobs)
    return Plan(
        name=spec.name,
        source="a number of parameters" if asked.params is not None else spec.model.path if spec.model else "",
        precision=_name_precision(spec),
        model=model,
        jobs=jobs,
        activations=shares[most].activations,
        communication=(*predict_communication(shares[most].model, layout), *shares[most].transfers),
        checkpoint=replace(
            predict_checkpoint(model, layout, state),
            rank=max(predict_checkpoint(share.model, layout, state).rank for share in shares),
        ),
        keep=spec.checkpoint.keep,
        course=course,
        limit=asked.device_memory,
        notes=tuple(notes),
        host_limit=asked.host_memory or _read_host_memory(),
        measured_here=asked.host_memory is None,
        ranks_here=min(spec.launch.nproc, world_size * spec.model_ranks),
        builds=_choose_building(spec, model, world_size),
    )


def _choose_building(spec: JobSpec, model: Model, world_size: int) -> Literal["whole", "stage", "share"]:
    if spec.pipeline.size > 1:
        return "whole" if spec.pipeline.partition.lower() == "time" else "stage"
    large = sum(weight.elements * weight.itemsize for weight in model.weights) >= LEAST_IN_SHARES
    return "share" if large and world_size > 1 and builds_in_shares(spec) else "whole"


def _make_job(share: Share, layout: Layout, state: OptimizerState) -> Job:
    activations = share.activations
    moved = activations.moved if activations.on else 0
    return Job(share.model, replace(layout, held=share.held), state, activations.asked, activations.largest, moved)


def _read_host_memory() -> int | None:
    """Bytes of memory of this machine, or of its container if that has a limit; None if unknown."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(installed, int(file.read()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return installed


def _name_precision(spec: JobSpec) -> Dtype:
    return "bf16" if spec.bf16.enabled else "fp16" if spec.fp16.enabled else "fp32"


def _read_layout(spec: JobSpec, world_size: int, offload: Offload | None) -> Layout:
    compute = _name_precision(spec)
    zero, summed = spec.zero_optimization, spec.data_types.grad_accum_dtype
    moved = zero.offload_optimizer
    disk = moved if moved and moved.device == "nvme" else None
    parameters = zero.offload_param if zero.parameters_on_disk else None
    moved_to = zero.offload_param if (offload or zero.offload) == "param" else moved
    layout = Layout(
        stage=spec.zero_optimization.stage,
        world_size=world_size,
        compute=_BYTES[compute],
        reduce=_BYTES[spec.communication_data_type or compute],
        grad_accum=spec.trainer.grad_accum,
        micro_batch=spec.trainer.micro_batch,
        offload=offload or zero.offload,
        accumulate=_BYTES[summed] if summed else 0,
        ratio=zero.offload_optimizer.ratio if zero.offload_optimizer else 1.0,
        group=max(zero.mics_shard_size, 0) if zero.stage == 3 else 0,
        ahead=zero.stage3_prefetch_bucket_size or 0,
        live=zero.stage3_max_live_parameters,
        disk_buffers=max(disk.buffer_count, 1) if disk else 0,
        block_buffers=max(parameters.buffer_count, 1) if parameters else 0,
        max_in_cpu=parameters.max_in_cpu if parameters else 0,
        pinned=moved_to.pin_memory if moved_to else True,
        stages=spec.pipeline.size,
        most_stage=2 if str(spec.pipeline.schedule) == "zero-bubble" else 3,
        context=spec.context_parallel.size,
        tensor=spec.tensor_parallel.ranks,
        master=2 if spec.bf16.low_masters else MASTER_SIZE,
        state=2 if spec.bf16.low_masters and spec.bf16.bf16_optimizer_states else MASTER_SIZE,
        second=zero.zero_hpz_partition_size if zero.stage == 3 and zero.zero_hpz_partition_size > 1 else 0,
    )
    layout = replace(layout, holds=_holds(spec, layout, compute))
    if layout.offload == "param" and layout.stages > 1:
        raise UsageError(
            "parameters cannot be offloaded in a pipeline", hint="dsjob validate --explain pipeline-offload says why"
        )
    if layout.offload_problem:
        raise UsageError(
            f"{layout.offload_problem}, but the stage is {layout.stage}",
            hint=f"zero_optimization.stage={3 if layout.offload == 'param' else '1, 2 or 3'}",
        )
    return layout


def _holds(spec: JobSpec, layout: Layout, compute: Dtype) -> bool:
    """Whether gradients are kept in another dtype between micro steps, as `Precision.held` decides."""
    own = compute if layout.stage == 1 else "bf16" if spec.bf16.low_masters else "fp32"
    summed = spec.data_types.grad_accum_dtype
    by_itself = layout.stage == 0 or layout.stages > 1 or (layout.replicated and summed == compute)
    return not by_itself and summed not in (None, "fp32", own)


_Looked = tuple[Model, OptimizerState, list[Share], Course]


def _count(spec: JobSpec, parameters: int, layout: Layout, notes: list[str]) -> _Looked:
    """A plan from the number of parameters alone. Imports nothing."""
    state, remark = assume_state(spec.optimizer)
    notes += [remark] if remark else []
    model = assume_model(parameters)
    notes.append(f"the model is assumed to have the shape of {model.assumed}; a document with the model has its own")
    notes.append("not included without a model: activations, steps and learning rates")
    parts = layout.stages * layout.tensor
    if layout.model_ranks > 1:
        notes.append("not included without a model: what is sent between stages, and between parts of the model")
    if parts > 1:
        notes.append(f"the model is assumed to divide evenly into {parts} parts")
    part = assume_model(parameters, stages=layout.stages, tensor=layout.tensor)
    share = Share(part, Activations(reason="there is no model to look at"))
    return model, state, [share] * layout.stages, Course()


def _look(spec: JobSpec, layout: Layout, notes: list[str], trust: Trust) -> _Looked:
    """Measures the model on the meta device, one micro batch of the data, the optimizer's state and the schedule."""
    from dsjob.compute.find_blocks import mark_leaves
    from dsjob.data.batches import count_elements, is_tokens
    from dsjob.training import probe
    from dsjob.training.activations import measure_activations
    from dsjob.training.build import count_steps
    from dsjob.training.imagined import measure_shares
    from dsjob.training.passed import NEVER

    assert spec.model is not None
    built = probe.build_on_meta(spec.model, trust)
    mark_leaves(built, spec.zero_optimization.leaf_module)
    model = probe.size_model(built)
    state = probe.probe_optimizer(spec.optimizer, trust) if spec.optimizer else OptimizerState(0)
    steps, samples, tokens, batch, reason = spec.trainer.max_steps, None, 0, None, ""
    try:
        loader = probe.load_data(spec, layout.world_size, trust)
        samples = loader.samples_per_epoch
        counted = count_steps(spec.trainer, samples)
        steps = None if counted == NEVER else counted
        batch = next(iter(loader))
        tokens = count_elements(batch) * spec.trainer.train_batch // spec.trainer.micro_batch if is_tokens(batch) else 0
    except (DataError, OSError) as error:
        if layout.stages > 1:  # it takes a batch to find out how the model can be divided
            raise
        reason = str(error).splitlines()[0]
    if layout.model_ranks > 1:
        shares = measure_shares(built, batch, spec, 1 if layout.replicated else layout.shards, trust)
    else:
        shares = [Share(model, measure_activations(built, batch, spec, trust) if not reason else Activations())]
    reason = reason or shares[0].activations.reason
    if reason:
        sent = ", and neither is what is sent of them" if layout.model_ranks > 1 else ""
        notes.append(f"activations are not counted{sent}: {reason}")
    rates = tuple(probe.trace_rates(spec, steps or 0, _PLOT_WIDTH, trust))
    per_epoch = -(-samples // spec.trainer.train_batch) if samples else None
    lengths = tuple(describe_lengths(spec, samples, tokens))
    return model, state, shares, Course(samples, per_epoch, steps, rates, lengths)
