"""A plan as text: rich tables, which are plain text if the output is not a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dsjob.console import Console, Table
from dsjob.planning.fit import Job, Row
from dsjob.planning.memory import MOMENTS, Place
from dsjob.planning.model import count
from dsjob.planning.plot import draw
from dsjob.planning.report import BUILT, Activations, Plan, show_bytes

_WHERE: dict[Place, str] = {"device": "", "host": "on the host", "disk": "on the disk"}


def print_plan(plan: Plan, rows: Sequence[Row]) -> None:
    """Prints the plan. `rows`: the table of `--sweep-stages`, or empty."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # files need not be limited to 80 columns
    _print_pairs(console, f"dsjob plan {plan.name}", _describe_job(plan))
    _print_memory(console, plan)
    _print_pairs(console, "", _describe_rest(plan))
    if plan.course.rates:
        console.print("learning rate", style="bold")
        for line in draw(plan.course.rates):
            console.print(f" {line}", soft_wrap=True)
    if rows:
        _print_sweep(console, plan, rows)
    for kind, texts in (("note", plan.notes), ("warning", plan.warnings)):
        for text in texts:
            console.say(kind, text)


def _print_pairs(console: Console, title: str, pairs: Sequence[tuple[str, str]]) -> None:
    table = Table(title, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    console.print(table)


def _describe_job(plan: Plan) -> list[tuple[str, str]]:
    model, layout = plan.model, plan.job.layout
    total, trained = count(model.weights), count(model.trainable)
    frozen = f", {trained:,} trained" if trained != total else ""
    source = f"{plan.source}, " if not model.assumed else ""
    shape = f"{model.blocks} blocks" if not model.assumed else f"shaped like {model.assumed}: {model.blocks} blocks"
    described = f"{source}{total:,} parameters{frozen}, {shape}"
    samples = layout.micro_batch * layout.grad_accum * layout.world_size
    ranks = (
        f"{layout.world_size} {'data-parallel ' if layout.model_ranks > 1 else ''}rank{'s' * (layout.world_size > 1)}"
    )
    sizes = [("pipe", layout.stages), ("context", layout.context), ("tensor", layout.tensor)]
    whole = "".join(f" x {size} {axis}" for axis, size in sizes if size > 1)
    return [
        ("model", described),
        ("layout", f"ZeRO stage {layout.stage}, {ranks}{whole}, {plan.precision}, offload {layout.offload}"),
        ("batch", f"{samples} = {layout.micro_batch} micro x {layout.grad_accum} accumulated x {ranks}"),
    ]


def _print_memory(console: Console, plan: Plan) -> None:
    memory = plan.memory
    stage = f" of stage {plan.stage}, which needs most" if len(plan.jobs) > 1 else ""
    table = Table(f"memory per rank{stage}", pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for name in MOMENTS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", min_width=20)
    for place in _WHERE:
        for item in memory.items:
            if item.place == place:
                cells = [show_bytes(getattr(item, moment)) if getattr(item, moment) else "" for moment in MOMENTS]
                remark = ", ".join(part for part in (_WHERE[place], item.note) if part)
                table.add_row(item.name, *cells, remark)
        if place == "device":
            table.add_section()
            total = "device" if memory.host else "total"
            table.add_row(total, *(show_bytes(memory.total(moment)) for moment in MOMENTS), _verdict(plan))
            table.add_section()
    if memory.host:
        table.add_row("host", *(show_bytes(memory.total(moment, "host")) for moment in MOMENTS), "")
    if memory.disk:
        table.add_row("disk", *(show_bytes(memory.total(moment, "disk")) for moment in MOMENTS), "")
    console.print(table)


def _verdict(plan: Plan) -> str:
    if plan.limit is None:
        return f"peak {show_bytes(plan.memory.peak)}"
    known = ", not counting activations" if plan.job.activations is None else ""
    return ("fits in " if plan.fits else "does not fit in ") + show_bytes(plan.limit) + known


def _describe_rest(plan: Plan) -> list[tuple[str, str]]:
    saved, course, activations = plan.checkpoint, plan.course, plan.activations
    pairs = [("model states", f"{show_bytes(plan.memory.states)} per rank when the optimizer steps")]
    if len(plan.jobs) > 1:
        pairs += [(f"stage {stage}", _describe_stage(job)) for stage, job in enumerate(plan.jobs)]
    if activations.whole is not None:
        pairs.append(("activations", _describe_activations(activations)))
    pairs.append(("host at start", f"{show_bytes(plan.building)} per rank: each rank builds {BUILT[plan.builds]}"))
    for transfer in plan.communication:
        sent = f"{show_bytes(transfer.sent)} sent by each rank"
        name = f"{transfer.axis} {transfer.collective}" if plan.job.layout.model_ranks > 1 else transfer.collective
        pairs.append((name, f"{show_bytes(transfer.bytes)} of {transfer.what} per step; {sent}"))
    kept = f", {show_bytes(saved.whole * plan.keep)} for the {plan.keep} that are kept" if plan.keep > 1 else ""
    written = f"{show_bytes(saved.rank)} written per rank"
    pairs.append(("checkpoint", f"{show_bytes(saved.whole)} of weights and optimizer{kept}; {written}"))
    sizes = f"{show_bytes(saved.fp32)} as fp32, {show_bytes(saved.bf16)} as bf16"
    pairs.append(("convert", f"weights only: {sizes}; streamed, so memory does not grow with the model"))
    if course.steps_per_epoch is not None:
        pairs.append(("epoch", f"{course.steps_per_epoch:,} steps over {course.samples:,} samples"))
    if course.steps is not None:
        pairs.append(("steps", f"{course.steps:,}"))
    return [*pairs, *course.lengths]


def _describe_stage(job: Job) -> str:
    memory, held = job.memory(), job.layout.held
    micro = f"{held} micro batch{'es' * (held > 1)}"
    return f"{show_bytes(memory.states)} of model states, peak {show_bytes(memory.peak)}, activations of {micro}"


def _describe_activations(activations: Activations) -> str:
    assert activations.whole is not None
    whole, again = show_bytes(activations.whole), activations.with_checkpointing
    if again is None:
        return whole
    if activations.on:
        return f"{show_bytes(again)} with recomputed blocks, {whole} without"
    return f"{whole}, or {show_bytes(again)} with activation_checkpointing.mode=full"


def _print_sweep(console: Console, plan: Plan, rows: Sequence[Row]) -> None:
    """Prints peaks of device memory per rank, by micro batch. With a limit, those that do not fit are marked."""
    table = Table("peak per rank, by micro batch", pad_edge=False)
    for column in ("stage", "offload", *rows[0].peaks, "host"):
        table.add_column(str(column), justify="left" if column == "offload" else "right", no_wrap=True)
    for row in rows:
        peaks = [_mark(peak, plan.limit) for peak in row.peaks.values()]
        table.add_row(str(row.stage), row.offload, *peaks, show_bytes(row.host) if row.host else "")
    console.print(table)
    if plan.limit is not None:
        console.print(f"x: does not fit in {show_bytes(plan.limit)}")


def _mark(peak: int, limit: int | None) -> str:
    return show_bytes(peak) + (" x" if limit is not None and peak > limit else "" if limit is None else "  ")
