"""Rules between the keys of a document: a table, one short function a rule, each with a stable id and its reason.

A rule sees the document in a job's words, of the right shape, with what is not set left out, and finds places to
complain about. `check` runs the table. Nothing here knows files, lines or the world size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dsjob.errors import Problem

Path = tuple[str | int, ...]
Document = dict[str, Any]
Finding = tuple[str | Path, str, str]  # place (dotted where all parts are names), message, hint
Check = Callable[[Document], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """`reason`: why it is a mistake. `whole`: it needs a whole job, and says nothing of a bare DeepSpeed config."""

    id: str
    reason: str
    check: Check
    severity: str = "error"
    whole: bool = False

    def find(self, document: Document) -> Iterator[Problem]:
        """The problems of this kind in a document."""
        for place, message, hint in self.check(document):
            path: Path = place if isinstance(place, tuple) else tuple(place.split(".")) if place else ()
            yield Problem(message, path, self.id, hint, severity=self.severity)


RULES: dict[str, Rule] = {}


def _rule(name: str, *, severity: str = "error", whole: bool = False) -> Callable[[Check], Check]:
    """Enters a function into the table; its docstring is the reason."""

    def enter(check: Check) -> Check:
        RULES[name] = Rule(name, " ".join((check.__doc__ or "").split()), check, severity, whole)
        return check

    return enter


def _get(document: Document, dotted: str, default: Any = None) -> Any:
    value: Any = document
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def _is_on(document: Document, section: str) -> bool:
    return _get(document, f"{section}.enabled") is True


def _stage(document: Document) -> int:
    stage = _get(document, "zero_optimization.stage", 0)
    return stage if isinstance(stage, int) else 0


def _offload(document: Document, what: str) -> str:
    device = _get(document, f"zero_optimization.offload_{what}.device", "none")
    return str(device)


# Precision


@_rule("fp16-with-bf16")
def _one_half_precision(document: Document) -> Iterator[Finding]:
    """A model computes in one dtype; with both switched on neither DeepSpeed nor dsjob could tell which is meant."""
    if _is_on(document, "fp16") and _is_on(document, "bf16"):
        yield "bf16.enabled", "is on, and so is fp16.enabled", "switch one of them off"


@_rule("amp-with-half-precision")
def _amp_alone(document: Document) -> Iterator[Finding]:
    """Apex's amp casts by itself: with fp16, bf16 or ZeRO there would be two hands at the same weights."""
    if _is_on(document, "amp"):
        others = [f"{name}.enabled" for name in ("fp16", "bf16", "torch_autocast") if _is_on(document, name)]
        others += ["zero_optimization.stage"] if _stage(document) else []
        if others:
            yield "amp.enabled", f"does not go with {' and '.join(others)}", "use bf16 or torch_autocast instead of amp"


@_rule("autocast-with-half-precision")
def _autocast_alone(document: Document) -> Iterator[Finding]:
    """Autocast lowers operators of an fp32 model; a model in half precision leaves it nothing to decide."""
    others = [f"{name}.enabled" for name in ("fp16", "bf16") if _is_on(document, name)]
    if _is_on(document, "torch_autocast") and others:
        yield "torch_autocast.enabled", f"does not go with {' and '.join(others)}", "switch one of them off"


@_rule("half-precision-masters")
def _masters(document: Document) -> Iterator[Finding]:
    """Masters in half precision are kept for one dtype only, and optimizer states in bf16 only beside bf16 masters."""
    if _get(document, "bf16.bf16_optimizer_states") and not _get(document, "bf16.bf16_master_weights_and_grads"):
        yield "bf16.bf16_optimizer_states", "needs bf16.bf16_master_weights_and_grads", "switch that on too"
    if _get(document, "bf16.bf16_master_weights_and_grads") and _get(document, "fp16.fp16_master_weights_and_grads"):
        yield "fp16.fp16_master_weights_and_grads", "does not go with bf16_master_weights_and_grads", "keep one"


@_rule("static-loss-scale-with-lamb")
def _lamb_scale(document: Document) -> Iterator[Finding]:
    """DeepSpeed's Lamb and OneBitLamb take the loss scale from a dynamic scaler alone."""
    kind = str(_get(document, "optimizer.type", "")).lower()
    if kind in ("lamb", "onebitlamb") and _is_on(document, "fp16") and _get(document, "fp16.loss_scale", 0):
        yield "fp16.loss_scale", f"must be 0 (dynamic) with {kind}", "leave loss_scale out"


# ZeRO and offloading


@_rule("offload-param-stage")
def _offload_param(document: Document) -> Iterator[Finding]:
    """Only stage 3 shards parameters, so only there can they be elsewhere; DeepSpeed ignores the key without a word."""
    if _offload(document, "param") != "none" and _stage(document) != 3:
        yield "zero_optimization.offload_param.device", f"needs stage 3, not {_stage(document)}", "set stage to 3"


@_rule("offload-optimizer-stage")
def _offload_optimizer(document: Document) -> Iterator[Finding]:
    """At stage 0 nothing is sharded, and the optimizer stays where the model is."""
    if _offload(document, "optimizer") != "none" and _stage(document) == 0:
        yield (
            "zero_optimization.offload_optimizer.device",
            "needs stage 1, 2 or 3, not 0",
            "set stage to 2, for example",
        )


@_rule("nvme-stage")
def _nvme_stage(document: Document) -> Iterator[Finding]:
    """Swapping to NVMe disks exists for stage 3 alone."""
    for what in ("param", "optimizer"):
        if _offload(document, what) == "nvme" and _stage(document) != 3:
            yield f"zero_optimization.offload_{what}.device", f"nvme needs stage 3, not {_stage(document)}", "use cpu"


@_rule("nvme-path")
def _nvme_path(document: Document) -> Iterator[Finding]:
    """Without a folder on the disk there is nowhere to swap to; DeepSpeed finds out when training begins."""
    for what in ("param", "optimizer"):
        if _offload(document, what) == "nvme" and not _get(document, f"zero_optimization.offload_{what}.nvme_path"):
            place = f"zero_optimization.offload_{what}"
            yield place, "device nvme needs nvme_path", 'nvme_path: "/local_nvme", for example'


@_rule("offload-ratio-stage")
def _offload_ratio(document: Document) -> Iterator[Finding]:
    """A part of the optimizer can be offloaded at stage 3 alone."""
    if _get(document, "zero_optimization.offload_optimizer.ratio", 1) < 1 and _stage(document) != 3:
        yield (
            "zero_optimization.offload_optimizer.ratio",
            f"below 1 needs stage 3, not {_stage(document)}",
            "leave it out",
        )


@_rule("mics-stage")
def _mics(document: Document) -> Iterator[Finding]:
    """Sub-groups of ranks that hold a whole model are a form of stage 3."""
    for key, off in (("mics_shard_size", -1), ("zero_hpz_partition_size", 1)):
        if _get(document, f"zero_optimization.{key}", off) not in (off, 0) and _stage(document) != 3:
            yield (
                f"zero_optimization.{key}",
                f"needs stage 3, not {_stage(document)}",
                "set stage to 3, or leave it out",
            )


@_rule("odd-allgather-bucket", severity="warning")
def _odd_bucket(document: Document) -> Iterator[Finding]:
    """DeepSpeed refuses an odd allgather_bucket_size when it starts, since its buffers are aligned."""
    size = _get(document, "zero_optimization.allgather_bucket_size", 0)
    if isinstance(size, (int, float)) and size % 2:
        yield "zero_optimization.allgather_bucket_size", f"{size} is odd, which DeepSpeed refuses", "make it even"


@_rule("pipeline-stage")
def _pipeline(document: Document) -> Iterator[Finding]:
    """Stages 2 and 3 reduce gradients after each micro batch, which a pipeline still has to add to."""
    stages = _get(document, "pipeline.stages")
    if isinstance(stages, int) and stages > 1 and _stage(document) >= 2:
        yield "zero_optimization.stage", f"{_stage(document)} does not go with a pipeline", "use stage 0 or 1"


@_rule("contiguous-checkpointing")
def _contiguous(document: Document) -> Iterator[Finding]:
    """Checkpoints are laid out in one buffer by partitions and their number: without both there is no layout."""
    section = _get(document, "activation_checkpointing", {})
    if section.get("contiguous_memory_optimization") is True:
        place = "activation_checkpointing.contiguous_memory_optimization"
        if section.get("partition_activations") is not True:
            yield place, "needs partition_activations", "switch partition_activations on, or this off"
        if not section.get("number_checkpoints"):
            yield place, "needs number_checkpoints", "give the number of checkpoints, the model's layers usually"


# Batch sizes

_TRIAD = {
    "trainer.train_batch": "train_batch_size",
    "trainer.micro_batch": "train_micro_batch_size_per_gpu",
    "trainer.grad_accum": "gradient_accumulation_steps",
}


@_rule("elasticity-with-batch")
def _elasticity(document: Document) -> Iterator[Finding]:
    """Elasticity chooses the batch sizes; what is given beside it would be lost, so DeepSpeed refuses both."""
    if _is_on(document, "elasticity") and not _get(document, "elasticity.ignore_non_elastic_batch_info"):
        for place, name in _TRIAD.items():
            if _get(document, place) is not None:
                yield place, f"is given, but elasticity chooses {name}", "leave one of the two out"


@_rule("elasticity-incomplete")
def _elasticity_keys(document: Document) -> Iterator[Finding]:
    """Elasticity computes batch sizes from a largest train batch and a list of micro batches."""
    if _is_on(document, "elasticity"):
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if _get(document, f"elasticity.{key}") is None:
                yield "elasticity", f"needs {key}", ""


# Optimizer and schedule


@_rule("clipping-in-optimizer")
def _max_grad_norm(document: Document) -> Iterator[Finding]:
    """Gradients are clipped over all ranks before the optimizer sees them; an optimizer knows its own shard alone."""
    norm = _get(document, "optimizer.params.max_grad_norm")
    if isinstance(norm, (int, float)) and norm > 0:
        yield "optimizer.params.max_grad_norm", "is not the optimizer's business", f"gradient_clipping: {norm:g}"


@_rule("optimizer-needs-closure")
def _closure(document: Document) -> Iterator[Finding]:
    """LBFGS evaluates the model itself, several times a step; accumulation and sharding leave no place for that."""
    if str(_get(document, "optimizer.type", "")).upper() == "LBFGS":
        yield "optimizer.type", "LBFGS cannot be driven by a training loop", "use AdamW or SGD, for example"


def _params(document: Document, section: str) -> dict[str, Any]:
    params = _get(document, f"{section}.params", {})
    return params if isinstance(params, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@_rule("rate-overruled", severity="warning")
def _rate(document: Document) -> Iterator[Finding]:
    """A warm-up to warmup_max_lr sets the rate itself: optimizer.params.lr is then never used.

    WarmupDecayLR goes to 0.001 where warmup_max_lr is not given, whatever the optimizer says.
    """
    own = _number(_params(document, "optimizer").get("lr"))
    kind, params = _get(document, "scheduler.type"), _params(document, "scheduler")
    highest = {"WarmupDecayLR": ("warmup_max_lr", 0.001), "WarmupLR": ("warmup_max_lr", None)}.get(str(kind))
    if highest is None or own is None:
        return
    name, default = highest
    rate = _number(params.get(name, default))
    if rate is not None and rate != own:
        given = "" if name in params else " (the default)"
        message = f"{own:g} is never used: {kind} goes to {name} {rate:g}{given}"
        yield "optimizer.params.lr", message, f"scheduler.params.{name}: {own:g}, if that is what you mean"


@_rule("warmup-backwards", severity="warning")
def _backwards(document: Document) -> Iterator[Finding]:
    """A warm-up that begins above its end lowers the rate."""
    params = _params(document, "scheduler")
    for low, high in (("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr")):
        first, last = _number(params.get(low)), _number(params.get(high))
        if first is not None and last is not None and first > last:
            yield f"scheduler.params.{low}", f"{first:g} is above {high} {last:g}", "exchange the two?"


def _steps(document: Document) -> int | None:
    total = _params(document, "scheduler").get("total_num_steps")
    steps = _get(document, "trainer.max_steps")
    known = [int(n) for n in (total, steps) if isinstance(n, (int, float))]
    return min(known) if known else None


@_rule("warmup-beyond-end", severity="warning")
def _long_warmup(document: Document) -> Iterator[Finding]:
    """A warm-up longer than the run never reaches its rate, and a decay after it never begins."""
    warmup, steps = _number(_params(document, "scheduler").get("warmup_num_steps")), _steps(document)
    if warmup is not None and steps is not None and warmup > steps:
        yield "scheduler.params.warmup_num_steps", f"{warmup:g} is longer than the run of {steps} steps", "shorten it"


@_rule("schedule-too-short", severity="warning", whole=True)
def _short_schedule(document: Document) -> Iterator[Finding]:
    """Steps after the end of a decay are taken at its lowest rate, which is usually 0: they change nothing."""
    total = _number(_params(document, "scheduler").get("total_num_steps"))
    steps = _get(document, "trainer.max_steps")
    if total is not None and isinstance(steps, int) and total < steps:
        message = f"{total:g} ends {steps - int(total)} steps before trainer.max_steps {steps}"
        yield "scheduler.params.total_num_steps", message, "leave it out: it is then the length of the run"


@_rule("momentum-not-cycled", severity="warning")
def _cycled(document: Document) -> Iterator[Finding]:
    """OneCycle cycles the first beta; an optimizer that has none keeps its momentum."""
    asked = _params(document, "scheduler").get("cycle_momentum") is True
    kind = str(_get(document, "optimizer.type", "")).lower()
    if _get(document, "scheduler.type") == "OneCycle" and asked and kind in ("sgd", "adagrad", "rmsprop"):
        yield (
            "scheduler.params.cycle_momentum",
            f"{_get(document, 'optimizer.type')} has no betas to cycle",
            "leave it out",
        )


@_rule("schedule-needs-evaluation", whole=True)
def _plateau(document: Document) -> Iterator[Finding]:
    """ReduceLROnPlateau looks at the evaluation loss: without evaluations on the way it never acts."""
    if _get(document, "scheduler.type") == "ReduceLROnPlateau":
        if not _get(document, "data.eval"):
            yield "scheduler.type", "ReduceLROnPlateau needs data.eval", "give data.eval and trainer.eval_every"
        elif not _get(document, "trainer.eval_every"):
            yield "scheduler.type", "ReduceLROnPlateau needs trainer.eval_every", "trainer.eval_every: 100, for example"


@_rule("no-total-steps", severity="error")
def _total(document: Document) -> Iterator[Finding]:
    """A job knows how many steps it takes; a program that calls `initialize` has to tell a schedule where it ends."""
    if "model" in document or _get(document, "scheduler.type") not in ("WarmupDecayLR", "WarmupCosineLR"):
        return
    params = _params(document, "scheduler")
    if params.get("total_num_steps", "auto") == "auto":
        place = "scheduler.params.total_num_steps" if "total_num_steps" in params else "scheduler"
        yield place, "needs total_num_steps", "the optimizer steps that the program will take"


# The course of a job


@_rule("finite")
def _finite(document: Document) -> Iterator[Finding]:
    """The resolved document is JSON, which has no inf and no nan; overrides and interpolations can bring them in."""
    places: list[tuple[Path, Any]] = [((), document)]
    while places:
        path, value = places.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield path, f"must be a finite number, not {value}", "leave it out, or null"
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        places += [((*path, key), item) for key, item in items]


@_rule("no-end", whole=True)
def _end(document: Document) -> Iterator[Finding]:
    """A job that names neither steps nor epochs would never end."""
    trainer = _get(document, "trainer", {})
    if "max_steps" not in trainer and "max_epochs" not in trainer:
        yield "trainer", "needs max_steps or max_epochs", "trainer.max_steps=1000, for example"


@_rule("no-optimizer", whole=True)
def _optimizer(document: Document) -> Iterator[Finding]:
    """Training without an optimizer changes nothing."""
    if "optimizer" not in document:
        yield "optimizer", "is missing: nothing would be trained", "optimizer: {type: AdamW, params: {lr: 1e-3}}"


@_rule("no-eval-data", whole=True)
def _eval_data(document: Document) -> Iterator[Finding]:
    """A cadence of evaluation, or metrics, without a set to evaluate on are a mistake in one place or the other."""
    if "eval" in _get(document, "data", {"eval": True}):
        return
    advice = "give data.eval, or leave it out"
    for key in ("eval_every", "eval_batches", "eval_at_start"):
        if _get(document, f"trainer.{key}"):
            yield f"trainer.{key}", "is set, but there is no data.eval", advice
    if document.get("metrics"):
        yield "metrics", "are given, but there is no data.eval", advice


@_rule("unknown-metric", whole=True)
def _metric(document: Document) -> Iterator[Finding]:
    """A callback that waits for a metric which nobody computes waits for ever."""
    known = {"eval/loss", *(f"eval/{name}" for name in _get(document, "metrics", {}))}
    for name, callback in _get(document, "callbacks", {}).items():
        monitored = callback.get("monitor") if isinstance(callback, dict) else None
        if isinstance(monitored, str) and monitored.startswith("eval/") and monitored not in known:
            yield f"callbacks.{name}.monitor", f'nobody computes "{monitored}"', f"there is {', '.join(sorted(known))}"


@_rule("cadence-beyond-end", severity="warning", whole=True)
def _cadence(document: Document) -> Iterator[Finding]:
    """What happens every n steps of a shorter run does not happen at all, but for what is done at the end."""
    steps = _get(document, "trainer.max_steps")
    for place, what in (("trainer.eval_every", "evaluations"), ("checkpoint.every", "saves")):
        every = _get(document, place)
        if isinstance(steps, int) and isinstance(every, int) and every > steps:
            yield place, f"{every} is beyond the last step, {steps}: no {what} on the way", "lower it"


@_rule("nothing-saved", severity="warning", whole=True)
def _saved(document: Document) -> Iterator[Finding]:
    """A run that saves neither on the way nor at its end leaves nothing behind."""
    if _get(document, "checkpoint.at_end", True) is not False:
        return
    every, steps = _get(document, "checkpoint.every", 0), _get(document, "trainer.max_steps")
    if not every or (isinstance(steps, int) and every > steps):
        yield (
            "checkpoint.at_end",
            "is off, and nothing is saved on the way: no checkpoint at all",
            "set checkpoint.every",
        )


@_rule("memory-between-ranks", whole=True)
def _memory(document: Document) -> Iterator[Finding]:
    """`memory://` lies in the memory of one process: ranks do not see what the others have saved there."""
    directory, nproc = _get(document, "checkpoint.dir", ""), _get(document, "launch.nproc", 1)
    if isinstance(directory, str) and directory.startswith("memory:") and nproc != 1:
        yield "checkpoint.dir", f"{directory} cannot be shared by {nproc} ranks", "use a folder, or an object store"


@_rule("output-not-local", whole=True)
def _local_output(document: Document) -> Iterator[Finding]:
    """Logs and metrics are appended to, which object stores do not know; checkpoints may be anywhere."""
    directory = _get(document, "output.dir", "")
    if isinstance(directory, str) and "://" in directory:
        yield "output.dir", f"must be a local folder, not {directory}", f"checkpoint.dir: {directory} for checkpoints"


_SHAPE = {
    "unknown-key": "A key that the contract does not have is a typo or stands at the wrong level. Other tools ignore "
    "it, and train with the default that it was meant to change.",
    "type": "A value is of another kind than the key takes: a number in quotes, for example, is a string.",
    "enum": "The key takes one of a few values.",
    "range": "A number is outside what the key can mean.",
    "length": "A text or list is empty, or has more or fewer parts than the key takes.",
    "pattern": "A text has not the form that the key takes.",
    "required": "The section cannot do without this key.",
    "type-and-target": "An optimizer or schedule is named by its type or by a _target_, not by both.",
    "unsupported": "DeepSpeed knows the key, dsjob does not do what it asks for, and ignoring it would change results.",
    "no-effect": "The key is known, and leaving it out gives the same results.",
    "deprecated": "An old spelling: it works, and its present name is told.",
    "given-twice": "A key and its other spelling are both given, and only one of them could count.",
    "conflict": "A job file and a DeepSpeed config say different things of one setting.",
    "batch": "train_batch = micro_batch x grad_accum x data-parallel world size has to hold, all of them at least 1.",
    "syntax": "The text is not JSON or YAML.",
    "duplicate-key": "A key is given twice in one object; JSON and YAML readers keep the last one without a word.",
    "number": "A number that no 64-bit float can hold.",
    "too-deep": "Nesting beyond what any document needs is refused, so that reading takes bounded time and memory.",
    "too-large": "A text beyond what any document needs is refused, so that reading takes bounded time and memory.",
    "alias": "YAML aliases that add up to more than any document needs are refused.",
    "not-an-object": "A document is one object (a mapping) of keys and values.",
    "interpolation": "A ${...} names something that is not there, or that cannot be resolved.",
    "not-there": "An override names a key that the composed document does not have.",
    "not-read": "A document names a DeepSpeed config at a URL, and nothing is fetched to check a document.",
    "remote-code": "An argument lets files from elsewhere run code when they are read.",
    "unpinned": "A name on a hub stands for whatever its owner puts there next; a revision does not change.",
    "hydra-section": "Hydra's own section can name code that runs before anything is checked.",
    "untrusted-target": "A document names code that the user has not granted: it would be imported and run.",
    "unreadable": "The file cannot be read.",
    "another-job": "The output folder holds the run of another model or data set, which would be continued.",
    "auto": '"auto" stands for a value that is derived from others, which are not there.',
}
EXPLANATIONS: dict[str, str] = {**_SHAPE, **{name: rule.reason for name, rule in RULES.items()}}
