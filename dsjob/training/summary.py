"""Summarises a run in a few rows: models, data, batch, precision, ZeRO, optimizer, output."""

from __future__ import annotations

from dsjob.checkpoint.live.committed import Loaded
from dsjob.compute.precision import name_dtype
from dsjob.contract.spec import EngineSpec, JobSpec, Zero
from dsjob.engine.engine import Engine
from dsjob.ranks.mesh import World
from dsjob.ranks.picture import describe_axes, draw_mesh
from dsjob.training.display import shorten
from dsjob.training.passed import NEVER
from dsjob.training.run import Run

Rows = list[tuple[str, str]]
_ON_HOST = {"none": "", "optimizer": ", optimizer on the host", "param": ", parameters and optimizer on the host"}


def _describe_offload(zero: Zero) -> str:
    on_disk = zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme"
    if zero.parameters_on_disk:
        return (
            ", parameters and optimizer state on a disk" if on_disk else ", parameters on a disk, optimizer on the host"
        )
    return _ON_HOST[zero.offload] + (", its state on a disk" if on_disk else "")


def describe_run(run: Run, run_dir: str, loaded: Loaded | None) -> Rows:
    """(title, text) rows with what a user may want to check before waiting for the run."""
    spec, world, trainer = run.spec, run.engine.world, run.spec.trainer
    size = run.loader.samples_per_epoch
    ranks = _count_ranks(world.data_size)
    batch = f"{trainer.train_batch} = {trainer.micro_batch} micro x {trainer.grad_accum} accumulated x {ranks}"
    models: Rows = []
    for name, engine in run.engines.items():
        described = _describe_engine(engine)
        models += [(name, "; ".join(text for _, text in described))] if spec.models else described
    rows: Rows = [
        *(models if spec.models else models[:1]),
        ("data", f"{spec.data.train.path if spec.data.train else ''}, {f'{size:,} samples' if size else 'a stream'}"),
        ("batch", batch),
        ("steps", _describe_length(run)),
        *([] if spec.models else models[1:]),
        ("device", f"{world.device.type}, {_count_ranks(world.everyone.size)}{_describe_parts(world)}"),
        *_draw(world),
        ("output", run_dir),
    ]
    if loaded is not None:
        exact = "" if loaded.exact else "; random generators were reseeded"
        rows.append(("resumed", "; ".join([f"{loaded.url} at step {loaded.step:,}{exact}", *loaded.notes])))
    return rows


def _describe_length(run: Run) -> str:
    length, size = run.spec.trainer.max_length, run.loader.samples_per_epoch
    if length is not None and length.measured and run.max_steps == NEVER:
        return f"until {length}"
    epochs = f", {_count_epochs(run.max_steps * run.spec.trainer.train_batch / size)}" if size else ""
    ends = f", or {length}" if length is not None and length.measured else ""
    return f"{run.max_steps:,}{epochs}{ends}"


def _count_epochs(number: float) -> str:
    text = f"{number:.3g}"
    return f"{text} epoch" if text == "1" else f"{text} epochs"


def _count_ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def _describe_parts(world: World) -> str:
    if world.divided:
        return f" = {describe_axes(world.axes)}"
    return f", {world.model.size} ranks per model" if world.model.size > 1 else ""


def _draw(world: World) -> Rows:
    """A picture of the mesh, if there is more than one axis."""
    several = sum(size > 1 for size in world.axes)
    lines = draw_mesh(world.axes, world.order) if world.divided and several > 1 else []
    return [("" if number else "mesh", line) for number, line in enumerate(lines)]


def _describe_engine(engine: Engine) -> Rows:
    spec = engine.spec
    total, trainable = engine.count_parameters()
    share = "" if trainable == total else f", {shorten(trainable)} trainable" if trainable else ", none trainable"
    path = spec.model.path if isinstance(spec, JobSpec) and spec.model else ""
    stage = spec.zero_optimization.stage
    alone = " (one rank: nothing to shard)" if stage and engine.world.data_size == 1 else ""
    rows = [
        ("model", f"{path}, {shorten(total)} parameters{share}"),
        ("precision", _describe_precision(engine)),
        ("ZeRO", f"stage {stage}{alone}{_describe_offload(spec.zero_optimization)}"),
        *([("engine", f"{engine.driver}'s")] if engine.driver else []),
        *_describe_blocks(spec),
    ]
    if engine.optimizer is not None:
        # Without a schedule, the optimizer's own: it need not be the document's (create_optimizer).
        group = engine.optimizer.param_groups[0]
        chosen = spec.optimizer.params.get("lr") if spec.scheduler and spec.optimizer else None
        lr = chosen or group.get("initial_lr", group.get("lr"))
        rate = f", lr {lr:g}" if isinstance(lr, (int, float)) else ""
        schedule = f", {spec.scheduler.label}" if spec.scheduler else ""
        clipping = f", clipping {spec.gradient_clipping:g}"
        rows.append(("optimizer", f"{type(engine.optimizer).__name__}{rate}{schedule}{clipping}"))
    return rows


def _describe_blocks(spec: EngineSpec) -> Rows:
    section, rows = spec.activation_checkpointing, []
    if section.mode != "none":
        which = "all blocks" if section.interval == 1 else f"1 block of {section.interval}"
        rows.append(("recomputed", f"{which}, {section.mode}{', inputs on the host' * section.cpu_checkpointing}"))
    if spec.compile.enabled:
        rows.append(("compiled", f"each block, by {spec.compile.backend}"))
    return rows


def _describe_precision(engine: Engine) -> str:
    scale = f", {'static' if engine.spec.fp16.loss_scale else 'dynamic'} loss scale {engine.loss_scale():g}"
    if engine.precision.autocast is not None:
        return f"fp32, autocast to {name_dtype(engine.precision.autocast)}" + scale * engine.precision.needs_scale
    low = engine.precision.name != "fp32"
    masters = f", {name_dtype(engine.precision.master)} masters"
    return engine.precision.name + masters * low + scale * engine.precision.needs_scale
