"""`dsjob plan`: what a job needs, from its document alone: memory, communication, checkpoints, steps, rates."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from dsjob.cli import parse_count
from dsjob.cli.run import split_source
from dsjob.cli.trusted import add_arguments, allow_protocols, grant, list_untrusted, read_environment
from dsjob.cli.unnamed import complete
from dsjob.contract.spec import Dtype, JobSpec, view
from dsjob.document import compose as composition
from dsjob.document.resolve import choose_world_size, resolve_job
from dsjob.errors import DataError, DocumentError, FitError, UsageError
from dsjob.launch import launcher
from dsjob.planning.communication import predict_checkpoint, predict_communication
from dsjob.planning.fit import Job, find_remedies, sweep
from dsjob.planning.model import COMPRESSING, Layout, Model, Offload, OptimizerState, assume_state
from dsjob.planning.report import Activations, Course, Plan, show_bytes, to_json
from dsjob.trust.grant import Trust

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "param")
_PLOT_WIDTH = 61


def main(arguments: list[str], debug: bool) -> int:
    """Plans, and prints text or JSON."""
    args = _parse(arguments)
    if args.require_fit and args.device_memory is None:
        raise UsageError("--require-fit needs to know what has to suffice", hint="add --device-memory 80GiB")
    allow_protocols(args.trust)
    file, overrides = split_source(args.source, bare=args.params is not None)
    composed = composition.compose(overrides, file=file, config_dir=args.config_dir, environment=read_environment())
    given = composed.document
    world_size, ranks_from = choose_world_size(
        given, composed.locate, asked=args.world_size, started=launcher.read_world_size()
    )
    if given.get("models") and args.params is None:
        raise UsageError(
            f"a plan is for one model, and the document has {len(given['models'])}",
            hint="--params N plans for N parameters",
        )
    if args.params is not None:
        given = complete(given, micro_batch=1)
    document = resolve_job(given, world_size=world_size, locate=composed.locate, ranks_from=ranks_from).document
    trust = grant(file, args)
    problems = list_untrusted(composed, document, trust) if args.params is None else []
    if problems:
        raise DocumentError(problems)
    sys.path += [folder for folder in trust.folders if folder not in sys.path]
    plan = _make_plan(document, world_size, args, trust)
    rows = sweep(plan.job) if args.sweep_stages else []
    if args.format == "json":
        print(json.dumps(to_json(plan, rows), indent=2))  # noqa: T201
    else:
        from dsjob.cli.plan_text import print_plan

        print_plan(plan, rows)
    if args.require_fit and not plan.fits:
        raise _explain(plan)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dsjob plan", description="What a job needs, from its document alone, before any GPU."
    )
    parser.add_argument(
        "source", nargs="*", metavar="FILE|+recipe=NAME|key=value", help="what to plan, as for dsjob run"
    )
    parser.add_argument(
        "--params", type=_parse_parameters, metavar="N", help="parameters (7e9, 7B, 350M) in place of the model"
    )
    parser.add_argument("--world-size", type=parse_count, metavar="N", help="ranks to plan for (launcher.nproc)")
    parser.add_argument("--device-memory", type=_parse_size, metavar="SIZE", help="memory of a device: 80GiB")
    own = "memory of a machine, which launcher.nproc ranks share (this one's)"
    parser.add_argument("--host-memory", type=_parse_size, metavar="SIZE", help=own)
    parser.add_argument("--offload", choices=_OFFLOADS, help="offload, whatever the document says")
    parser.add_argument("--sweep-stages", action="store_true", help="a table of ZeRO stage x offload x micro batch")
    parser.add_argument("--require-fit", action="store_true", help="exit with 3 where it does not fit")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with configs of your own")
    add_arguments(parser)
    return parser.parse_intermixed_args(arguments)


def _parse_parameters(text: str) -> int:
    """7e9, 7B, 350M or 124000000 as a number."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper())
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters: write 7e9, 7B or 350M")
    return round(number)


def _parse_size(text: str) -> int:
    from dsjob.checkpoint.offline.convert import parse_size

    try:
        size = parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from error
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory: write 80GiB")
    return size


def _make_plan(document: dict[str, Any], world_size: int, args: argparse.Namespace, trust: Trust) -> Plan:
    spec = view(JobSpec, document)
    world_size //= spec.trainer.model_parallel_size
    layout = _read_layout(spec, world_size, args.offload)
    notes: list[str] = []
    if args.params is not None:
        if layout.offload == "param":
            raise UsageError(
                "offloaded parameters need the model: its largest block is what a device holds of them",
                hint="plan a document that names the model, without --params",
            )
        model, state, activations, course = _count(spec, args.params, notes)
    else:
        model, state, activations, course = _look(spec, world_size, notes, trust)
    if spec.optimizer and (spec.optimizer.type or "").lower() in COMPRESSING and world_size > 1:
        notes.append("optimizer state is that after the freeze step; from there on a 32nd of the all-reduce is sent")
    if spec.trainer.model_parallel_size > 1:
        notes.append("the model is taken for the part of a model-parallel rank, and ranks for the data-parallel ones")
    if spec.engine == "deepspeed":
        notes.append("engine: deepspeed: all figures are of dsjob's own engine; DeepSpeed's buckets and copies differ")
    if spec.torch_autocast.enabled:
        notes.append("torch_autocast: activations are counted as fp32, and are smaller")
    if layout.stage and world_size == 1 and layout.offload == "none":
        notes.append(f"stage {layout.stage} on one rank: nothing to shard")
    return Plan(
        name=spec.name,
        source="a number of parameters" if args.params is not None else spec.model.path if spec.model else "",
        precision=_name_precision(spec),
        job=Job(
            model, layout, state, activations.asked, activations.largest, activations.moved if activations.on else 0
        ),
        activations=activations,
        communication=predict_communication(model, layout),
        checkpoint=predict_checkpoint(model, layout, state),
        keep=spec.checkpoint.keep,
        course=course,
        limit=args.device_memory,
        notes=tuple(notes),
        host_limit=args.host_memory or _read_host_memory(),
        ranks_here=min(spec.launch.nproc, world_size * spec.trainer.model_parallel_size),
    )


def _read_host_memory() -> int | None:
    """Bytes of memory of this machine, or of the container that this is; None where nobody says."""
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
        second=zero.zero_hpz_partition_size if zero.stage == 3 and zero.zero_hpz_partition_size > 1 else 0,
    )
    if layout.offload_problem:
        raise UsageError(
            f"{layout.offload_problem}, not {layout.stage}",
            hint=f"zero_optimization.stage={3 if layout.offload == 'param' else '1, 2 or 3'}",
        )
    return layout


_Looked = tuple[Model, OptimizerState, Activations, Course]


def _count(spec: JobSpec, parameters: int, notes: list[str]) -> _Looked:
    """A model of which the number of parameters is known: nothing is imported."""
    state, remark = assume_state(spec.optimizer)
    notes += [remark] if remark else []
    notes.append("left out, for lack of a model: activations, blocks and their buffers; and steps and rates")
    return Model.of_count(parameters), state, Activations(reason="there is no model to look at"), Course()


def _look(spec: JobSpec, world_size: int, notes: list[str], trust: Trust) -> _Looked:
    """The model on the meta device, a micro batch of the data, the optimizer's state, the schedule."""
    from dsjob.compute.find_blocks import mark_leaves
    from dsjob.training import probe
    from dsjob.training.job import count_steps

    assert spec.model is not None
    built = probe.build_on_meta(spec.model, trust)
    mark_leaves(built, spec.zero_optimization.leaf_module)
    model = probe.size_model(built)
    state = probe.probe_optimizer(spec.optimizer, trust) if spec.optimizer else OptimizerState(0)
    steps, samples = spec.trainer.max_steps, None
    try:
        loader = probe.load_data(spec, world_size, trust)
        samples = loader.samples_per_epoch
        steps = count_steps(spec.trainer, samples)
        activations = probe.measure_activations(built, next(iter(loader)), spec, trust)
    except (DataError, OSError) as error:
        activations = Activations(reason=str(error).splitlines()[0])
    if activations.reason:
        notes.append(f"activations are not counted: {activations.reason}")
    rates = tuple(probe.trace_rates(spec, steps or 0, _PLOT_WIDTH, trust))
    per_epoch = -(-samples // spec.trainer.train_batch) if samples else None
    return model, state, activations, Course(samples, per_epoch, steps, rates)


def _explain(plan: Plan) -> FitError:
    """What does not fit, which item is the biggest, and what would help."""
    assert plan.limit is not None
    memory = plan.memory
    moment = memory.peak_moment
    biggest = max((item for item in memory.items if item.place == "device"), key=lambda item: getattr(item, moment))
    remedies = find_remedies(plan.job, plan.limit, None if plan.activations.on else plan.activations.with_checkpointing)
    return FitError(
        f"it does not fit: a rank needs {show_bytes(memory.peak)}, a device has {show_bytes(plan.limit)}; "
        f"the biggest item is {biggest.name}, {show_bytes(getattr(biggest, moment))}",
        hint=f"any of these would make it fit: {'; '.join(remedies)}"
        if remedies
        else "no smaller micro batch, higher stage or number of ranks up to 4,096 would make it fit: a smaller model, "
        "or several of these together",
    )
