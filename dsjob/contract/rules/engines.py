"""Rules of `engine: deepspeed`: what DeepSpeed does not do, or not by the config alone that a job gives it."""

from __future__ import annotations

from collections.abc import Iterator

from dsjob.contract.rules.table import Document, Finding, enter, is_driven, is_on, read, read_stage

_OTHER = "leave engine out"
_BY_ELEMENT = {
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "lion", "nadam", "radam", "rmsprop", "rprop", "sgd"
}  # fmt: skip


@enter("deepspeed-models")
def _models(document: Document) -> Iterator[Finding]:
    """DeepSpeed keeps one process-wide config of several models, and has nothing for one that is not trained."""
    if is_driven(document) and document.get("models"):
        yield "engine", "deepspeed does not go with models", _OTHER


@enter("deepspeed-optimizer")
def _optimizer(document: Document) -> Iterator[Finding]:
    """DeepSpeed steps flat pieces of many parameters at once: what looks at a whole one, or communicates by itself,
    would compute something else there without a word. Only what works element by element is let through."""
    place = "type" if read(document, "optimizer.type") else "_target_"
    kind = str(read(document, f"optimizer.{place}", "")).rpartition(".")[2]
    if is_driven(document) and kind and kind.lower() not in _BY_ELEMENT:
        yield f"optimizer.{place}", f"{kind} does not go with engine deepspeed", f"use AdamW, or {_OTHER}"


@enter("deepspeed-mpu", whole=True)
def _mpu(document: Document) -> Iterator[Finding]:
    """What is kept of each part of a model, and where, is known of dsjob's own engine alone."""
    if is_driven(document) and read(document, "trainer.mpu"):
        yield "trainer.mpu", "does not go with engine deepspeed", _OTHER


@enter("deepspeed-compile")
def _compile(document: Document) -> Iterator[Finding]:
    """DeepSpeed's hooks sit inside of what would be compiled."""
    if is_driven(document) and is_on(document, "compile"):
        yield "compile.enabled", "does not go with engine deepspeed", f"switch it off, or {_OTHER}"


@enter("deepspeed-fp16-stage")
def _fp16(document: Document) -> Iterator[Finding]:
    """At stage 0, with an optimizer that a program brings, DeepSpeed divides gradients by a loss scale that it has not
    multiplied the loss by."""
    if is_driven(document) and is_on(document, "fp16") and read_stage(document) == 0:
        yield "fp16.enabled", "needs stage 1, 2 or 3 with engine deepspeed", f"set stage to 1, or {_OTHER}"


@enter("deepspeed-amp")
def _amp(document: Document) -> Iterator[Finding]:
    """amp stands for fp16 or autocast at stage 0, where DeepSpeed's loss scaling is not that of its other stages."""
    if is_driven(document) and is_on(document, "amp"):
        yield "amp.enabled", "does not go with engine deepspeed", f"use bf16, or {_OTHER}"


@enter("deepspeed-autocast")
def _autocast(document: Document) -> Iterator[Finding]:
    """At stage 0 DeepSpeed scales losses under autocast by torch's GradScaler, whose state no checkpoint would hold."""
    named = str(read(document, "torch_autocast.dtype", ""))
    low = "bf16" in named or "bfloat16" in named
    if is_driven(document) and is_on(document, "torch_autocast") and read_stage(document) == 0 and not low:
        yield "torch_autocast.dtype", "must be bfloat16 at stage 0 with engine deepspeed", f"say so, or {_OTHER}"


@enter("deepspeed-groups")
def _groups(document: Document) -> Iterator[Finding]:
    """MiCS and hpZ need a model that was built inside of DeepSpeed's own zero.Init."""
    for key, off in (("mics_shard_size", -1), ("zero_hpz_partition_size", 1)):
        if is_driven(document) and read(document, f"zero_optimization.{key}", off) not in (off, 0):
            yield f"zero_optimization.{key}", "does not go with engine deepspeed", f"leave it out, or {_OTHER}"
