"""Rules about tensor and context parallelism: what cannot be combined with layers or sequences that ranks divide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dsjob.contract.model_ranks import read_context_size, read_tensor_size
from dsjob.contract.paths import Path
from dsjob.contract.rules.pipelines import count_stages
from dsjob.contract.rules.spreading import STEPPED_IN_PARTS
from dsjob.contract.rules.table import Document, Finding, enter, is_driven, is_on, read

# Optimizers that need a parameter as a whole, and know how ranks divide it.
_KNOW_PARTS = ("lamb", "muon")
_OFF = "leave it out, or leave tensor_parallel out"


@enter("tensor-size-twice")
def _one_size(document: Document) -> Iterator[Finding]:
    """autotp_size is DeepSpeed's name of size. Only one of two values can count."""
    size, theirs = read(document, "tensor_parallel.size", 1), read(document, "tensor_parallel.autotp_size", 0)
    if theirs > 1 and size > 1 and size != theirs:
        yield "tensor_parallel.autotp_size", f"is {theirs}, but tensor_parallel.size is {size}", "keep one of them"


@enter("tensor-parallel-with", whole=True)
def _with(document: Document) -> Iterator[Finding]:
    """Ranks divide the layers of one model by its plan. Several models, an mpu, which divides the ranks itself, or
    DeepSpeed's engine would divide something else."""
    if read_tensor_size(document) == 1:
        return
    if is_driven(document):
        yield "engine", "deepspeed cannot be combined with tensor_parallel", "use engine: dsjob"
    if document.get("models"):
        yield "models", "cannot be combined with tensor_parallel", "train one model, or leave tensor_parallel out"
    if read(document, "trainer.mpu"):
        yield "trainer.mpu", "cannot be combined with tensor_parallel, which divides the ranks itself", "leave it out"


@enter("partition-config")
def _partition_config(document: Document) -> Iterator[Finding]:
    """partition_config and preset_model take the place of plan, so only one of them can count. Patterns are regular
    expressions; a shape says how the outputs of a layer are divided, so it does not apply to rows."""
    if not isinstance(read(document, "tensor_parallel.plan", "auto"), str):
        for key in ("partition_config", "preset_model"):
            if read(document, f"tensor_parallel.{key}") is not None:
                yield f"tensor_parallel.{key}", "cannot be combined with tensor_parallel.plan", "keep one of them"
    path = ("tensor_parallel", "partition_config", "layer_specs")
    for number, spec in enumerate(read(document, ".".join(path), []) or []):
        here = (*path, number)
        patterns = spec.get("patterns") if isinstance(spec, dict) else None
        for index, pattern in enumerate(patterns if isinstance(patterns, list) else []):
            if fault := _find_fault(pattern):
                yield (*here, "patterns", index), f"is not a regular expression: {fault}", "escape special characters"
        if patterns and spec.get("shape"):
            yield from _check_shape(here, spec)


def _find_fault(pattern: Any) -> str:
    try:
        re.compile(str(pattern))
    except re.error as error:
        return str(error)
    return ""


def _check_shape(here: Path, spec: dict[str, Any]) -> Iterator[Finding]:
    shape, dim = spec["shape"], spec.get("partition_dim") or 0
    fits = [
        dim == 0 and len(shape) == 2 and (_is_size(shape[0]) or _are_sizes(shape[0])),
        dim == 1 and len(shape) == 3 and _is_size(shape[0]),
    ]
    if spec.get("partition_type", "column") != "column":
        yield (*here, "shape"), "applies only to partition_type column", "leave it out"
    elif not any(fits):
        hint = "use [n, -1] or [[a, b, ...], -1] with partition_dim 0, or [n, -1, inputs] with partition_dim 1"
        yield (*here, "shape"), f"{shape} cannot be divided along partition_dim {dim}", hint
    elif spec.get("gather_output"):
        yield (*here, "gather_output"), "cannot be combined with shape", "leave one of them out"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_size, value))


@enter("tensor-parallel-compiled")
def _compiled(document: Document) -> Iterator[Finding]:
    """Divided layers exchange activations in the midst of a block, in a way that the compiler does not see through."""
    if read_tensor_size(document) > 1 and is_on(document, "compile"):
        yield "compile.enabled", "cannot be combined with tensor_parallel", _OFF


@enter("mesh-groups")
def _groups(document: Document) -> Iterator[Finding]:
    """MiCS and hpZ make groups among all ranks of the job. Where ranks divide a model or its sequences, only some of
    them hold the same parts."""
    sizes = {
        "pipeline": count_stages(document),
        "context_parallel": read_context_size(document),
        "tensor_parallel": read_tensor_size(document),
    }
    by = next((key for key, size in sizes.items() if size > 1), None)
    for key, off in (("mics_shard_size", 0), ("zero_hpz_partition_size", 1)):
        size = read(document, f"zero_optimization.{key}", off)
        if by is not None and isinstance(size, int) and size > off:
            place = f"zero_optimization.{key}"
            yield place, f"{size} cannot be combined with {by}", "leave it out to shard over all ranks"


@enter("tensor-parallel-optimizer")
def _optimizer(document: Document) -> Iterator[Finding]:
    """A rank has only parts of parameters. An optimizer must update each element on its own, or know how parameters are
    divided. Others would compute norms, factors or signs of the parts."""
    kind = read(document, "optimizer.type")
    if read_tensor_size(document) == 1 or not isinstance(kind, str):
        return
    if kind.lower() not in (*STEPPED_IN_PARTS, *_KNOW_PARTS):
        known = ", ".join((*STEPPED_IN_PARTS, *_KNOW_PARTS))
        yield "optimizer.type", f"{kind} cannot be combined with tensor_parallel", f"use one of {known}"


@enter("loss-parallel-with", whole=True)
def _loss_parallel(document: Document) -> Iterator[Finding]:
    """With loss_parallel, no rank has all logits of a training step: only a plain cross entropy can be computed from
    their parts. In a pipeline, an embedding that shares the output layer's weight is on another stage."""
    if read_tensor_size(document) == 1 or not read(document, "tensor_parallel.loss_parallel"):
        return
    hint = "leave it out, or leave tensor_parallel.loss_parallel out"
    if count_stages(document) > 1:
        yield "pipeline.stages", "cannot be combined with tensor_parallel.loss_parallel", hint
    if read(document, "label_smoothing", 0):
        yield "label_smoothing", "cannot be combined with tensor_parallel.loss_parallel", hint
    for name, metric in (read(document, "metrics", {}) or {}).items():
        if isinstance(metric, dict) and "train" in (metric.get("phases") or ()):
            yield ("metrics", name, "phases"), "train needs logits, which loss_parallel does not put together", hint


@enter("context-parallel-with", whole=True)
def _contexts(document: Document) -> Iterator[Finding]:
    """Ranks exchange parts of sequences inside the attention of one stack of blocks, in a way that neither the compiler
    nor a pipeline sees through, and that several models, an mpu or DeepSpeed's engine would divide otherwise."""
    if read_context_size(document) == 1:
        return
    hint = "leave it out, or leave context_parallel out"
    if is_driven(document):
        yield "engine", "deepspeed cannot be combined with context_parallel", "use engine: dsjob"
    if is_on(document, "compile"):
        yield "compile.enabled", "cannot be combined with context_parallel", hint
    if count_stages(document) > 1:
        yield "pipeline.stages", "cannot be combined with context_parallel", hint
    for key, given in (("models", document.get("models")), ("trainer.mpu", read(document, "trainer.mpu"))):
        if given:
            yield key, "cannot be combined with context_parallel", hint
