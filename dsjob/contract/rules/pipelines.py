"""Rules about pipelines: what cannot be divided among stages, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsjob.contract.rules.table import Document, Finding, enter, is_driven, read, read_offload, read_stage

_PARTITIONS = ("best", "parameters", "time", "uniform")
_CHUNKED = ("interleaved", "zero-bubble")


def count_stages(document: Document) -> int:
    """The number of pipeline stages; 1 without a pipeline."""
    stages = read(document, "pipeline.stages")
    return stages if isinstance(stages, int) and not isinstance(stages, bool) else 1


@enter("zero-bubble-stage")
def _zero_bubble(document: Document) -> Iterator[Finding]:
    """At stage 3, parameters are freed after a backward pass, and gathered only for the next one. The zero-bubble
    schedule computes the gradients of weights in between."""
    if read(document, "pipeline.schedule") == "zero-bubble" and read_stage(document) == 3:
        yield (
            "pipeline.schedule",
            "zero-bubble needs ZeRO stage 0, 1 or 2, but the stage is 3",
            "use 1f1b or interleaved",
        )


@enter("pipeline-partition")
def _partition(document: Document) -> Iterator[Finding]:
    """Layers are divided evenly by their trained parameters, by their number, by the number of those whose class
    matches a regular expression, or by the time that each takes."""
    method = str(read(document, "pipeline.partition", "best"))
    kind, _, pattern = method.partition(":")
    if kind.lower() == "type" and pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            yield "pipeline.partition", f"{pattern} is not a regular expression: {error}", "for example type:Block"
    elif method.lower() not in _PARTITIONS:
        yield "pipeline.partition", f"{method} is unknown", "use parameters, uniform, type:REGEX or time"


@enter("pipeline-chunks")
def _chunks(document: Document) -> Iterator[Finding]:
    """Several parts of the model on each rank only help a schedule that goes through them in turn."""
    schedule, chunks = read(document, "pipeline.schedule", "1f1b"), read(document, "pipeline.chunks", 1)
    if not isinstance(schedule, str) or not isinstance(chunks, int):
        return
    if schedule == "interleaved" and chunks < 2 and count_stages(document) > 1:
        yield (
            "pipeline.schedule",
            "interleaved needs pipeline.chunks of 2 or more",
            "set pipeline.chunks=2, or use 1f1b",
        )
    if chunks > 1 and schedule not in _CHUNKED:
        yield "pipeline.chunks", f"{chunks} needs the schedule interleaved or zero-bubble", "leave it out"


@enter("pipeline-micro-batches", whole=True)
def _micro_batches(document: Document) -> Iterator[Finding]:
    """The micro batches of a pipeline are those of gradient accumulation: both keys mean the same number."""
    micro, accumulated = read(document, "pipeline.micro_batches"), read(document, "trainer.grad_accum")
    if isinstance(micro, int) and isinstance(accumulated, int) and micro != accumulated:
        yield "pipeline.micro_batches", f"is {micro}, but trainer.grad_accum is {accumulated}", "keep one of them"


@enter("pipeline-offload")
def _offload(document: Document) -> Iterator[Finding]:
    """Offloading copies gradients to the host during the backward pass that reduces them. In a pipeline, several micro
    batches are under way at once, and gradients are reduced after all of them."""
    if count_stages(document) == 1:
        return
    for what in ("optimizer", "param"):
        device = read_offload(document, what)
        if device == "nvme" or (device != "none" and what == "param"):
            key = f"zero_optimization.offload_{what}.device"
            yield key, f"{device} cannot be combined with a pipeline", "leave it out, or use offload_optimizer: cpu"


@enter("pipeline-with", whole=True)
def _with(document: Document) -> Iterator[Finding]:
    """A pipeline runs all micro batches of a step together, on stages of which only the last has the model's output. A
    step of the user's own, several models, or another program's engine would run them one by one. An mpu divides the
    ranks itself, and the 1-bit optimizers exchange momenta among all ranks, which must have the same parameters."""
    if count_stages(document) == 1:
        return
    if is_driven(document):
        yield "engine", "deepspeed cannot be combined with a pipeline", "use engine: dsjob"
    if document.get("models"):
        yield "models", "cannot be combined with a pipeline", "train one model, or leave pipeline.stages out"
    for key in ("step", "eval_step", "mpu", "disable_auto_grad_accumulation"):
        if read(document, f"trainer.{key}"):
            yield f"trainer.{key}", "cannot be combined with a pipeline", "leave it out, or leave pipeline.stages out"
    kind = str(read(document, "optimizer.type", "")).lower()
    if kind in ("onebitadam", "onebitlamb", "zerooneadam"):
        yield "optimizer.type", f"{kind} cannot be combined with a pipeline", "use AdamW"
