"""Rules about `engine: deepspeed`: what DeepSpeed does not support, or not with nothing but a job's config."""

from __future__ import annotations

from collections.abc import Iterator

from dsjob.contract.rules.table import Document, Finding, enter, is_driven, is_on, read, read_stage

_OTHER = "remove engine: deepspeed"
# Optimizers that compute each element on its own, so that they work on any piece of a parameter.
_BY_ELEMENT = {
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "lion", "nadam", "radam", "rmsprop", "rprop", "sgd"
}  # fmt: skip


@enter("deepspeed-models")
def _models(document: Document) -> Iterator[Finding]:
    """DeepSpeed has one process-wide config, even for several models, and does not support a model that is not
    trained."""
    if is_driven(document) and document.get("models"):
        yield "engine", "deepspeed does not support models", _OTHER


@enter("deepspeed-optimizer")
def _optimizer(document: Document) -> Iterator[Finding]:
    """DeepSpeed steps flat pieces of many parameters at once. An optimizer that needs whole parameters, or communicates
    on its own, would silently compute something else. Only optimizers that work element by element are accepted."""
    place = "type" if read(document, "optimizer.type") else "_target_"
    kind = str(read(document, f"optimizer.{place}", "")).rpartition(".")[2]
    if is_driven(document) and kind and kind.lower() not in _BY_ELEMENT:
        yield f"optimizer.{place}", f"{kind} does not work with engine deepspeed", f"use AdamW, or {_OTHER}"


@enter("deepspeed-mpu", whole=True)
def _mpu(document: Document) -> Iterator[Finding]:
    """Checkpoints of model-parallel models need to know which parts each rank holds. Only dsjob's engine does."""
    if is_driven(document) and read(document, "trainer.mpu"):
        yield "trainer.mpu", "does not work with engine deepspeed", _OTHER


@enter("deepspeed-compile")
def _compile(document: Document) -> Iterator[Finding]:
    """DeepSpeed's hooks are inside the blocks that would be compiled."""
    if is_driven(document) and is_on(document, "compile"):
        yield "compile.enabled", "does not work with engine deepspeed", f"turn it off, or {_OTHER}"


@enter("deepspeed-ops")
def _ops(document: Document) -> Iterator[Finding]:
    """DeepSpeed steps its own optimizers, or flat parts of parameters that dsjob does not see, and gathers a layer's
    weight in its own way."""
    for name in ("cpu_optimizers", "onebit", "transformer", "linear_cross_entropy"):
        if is_driven(document) and read(document, f"ops.{name}") == "require":
            yield f"ops.{name}", "require does not work with engine deepspeed", f"set auto, or {_OTHER}"


@enter("deepspeed-generation")
def _generation(document: Document) -> Iterator[Finding]:
    """At stage 3, transformers lets ranks wait for one another in generate only if it knows of the sharding. A program
    tells it; a job does not."""
    if is_driven(document) and read(document, "generation") is not None and read_stage(document) == 3:
        yield "generation", "does not work at stage 3 with engine deepspeed", _OTHER


@enter("deepspeed-fp16-stage")
def _fp16(document: Document) -> Iterator[Finding]:
    """At stage 0, with an optimizer that the program passes in, DeepSpeed divides gradients by a loss scale without
    having multiplied the loss by it."""
    if is_driven(document) and is_on(document, "fp16") and read_stage(document) == 0:
        yield "fp16.enabled", "needs stage 1, 2 or 3 with engine deepspeed", f"set stage to 1, or {_OTHER}"


@enter("deepspeed-amp")
def _amp(document: Document) -> Iterator[Finding]:
    """amp means fp16 or autocast at stage 0, where DeepSpeed scales losses differently than at its other stages."""
    if is_driven(document) and is_on(document, "amp"):
        yield "amp.enabled", "does not work with engine deepspeed", f"use bf16, or {_OTHER}"


@enter("deepspeed-autocast")
def _autocast(document: Document) -> Iterator[Finding]:
    """At stage 0 under autocast, DeepSpeed scales losses with torch's GradScaler, whose state no checkpoint would
    hold."""
    named = str(read(document, "torch_autocast.dtype", ""))
    low = "bf16" in named or "bfloat16" in named
    if is_driven(document) and is_on(document, "torch_autocast") and read_stage(document) == 0 and not low:
        hint = f"set dtype: bfloat16, or {_OTHER}"
        yield "torch_autocast.dtype", "must be bfloat16 at stage 0 with engine deepspeed", hint


@enter("deepspeed-groups")
def _groups(document: Document) -> Iterator[Finding]:
    """MiCS and hpZ require a model that was built inside DeepSpeed's own zero.Init."""
    for key, off in (("mics_shard_size", -1), ("zero_hpz_partition_size", 1)):
        if is_driven(document) and read(document, f"zero_optimization.{key}", off) not in (off, 0):
            yield f"zero_optimization.{key}", "does not work with engine deepspeed", f"leave it out, or {_OTHER}"
