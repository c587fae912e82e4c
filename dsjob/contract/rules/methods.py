"""Rules of optimizers and schedules."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from dsjob.contract.rules.table import Document, Finding, enter, read, read_number, read_params
from dsjob.contract.torch_names import OPTIMIZERS, SCHEDULES

_DEEPSPEED_OPTIMIZERS = (
    "adagrad", "adam", "adamw", "lamb", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd", "lion",
    "muon", "sgd",
)  # fmt: skip
_DEEPSPEED_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_ENDING = (  # of transformers' schedules
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "warmup_stable_decay",
)
_TRANSFORMERS_SCHEDULES = (*_ENDING, "constant", "constant_with_warmup", "inverse_sqrt")
_KNOWN = {
    "optimizer": (*OPTIMIZERS, "Lamb", "Lion", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"),
    "scheduler": (*_DEEPSPEED_SCHEDULES, *_TRANSFORMERS_SCHEDULES, *SCHEDULES),
}
_TOTALS = ("total_num_steps", "num_training_steps")  # DeepSpeed's word for the length of a schedule, and transformers'


@enter("unknown-name")
def _known_names(document: Document) -> Iterator[Finding]:
    """An optimizer or schedule is named as by DeepSpeed (optimizers in any case) or by a class of torch: others have
    to be given as a _target_.
    """
    for section, what in (("optimizer", "optimizer"), ("scheduler", "schedule")):
        kind = read(document, f"{section}.type")
        if isinstance(kind, str) and not _is_known(section, kind):
            meant = find_meant(section, kind)
            hint = f'did you mean "{meant}"?' if meant else f"known: {', '.join(_KNOWN[section])}, or a _target_"
            yield f"{section}.type", f'there is no {what} "{kind}"', hint


def _is_known(section: str, kind: str) -> bool:
    return kind in _KNOWN[section] or (section == "optimizer" and kind.lower() in _DEEPSPEED_OPTIMIZERS)


def find_meant(section: str, kind: str) -> str:
    """The type of an optimizer or schedule (`section`) that an unknown one is nearest to; "" for one that is known, or
    near to none."""
    if _is_known(section, kind):
        return ""
    lower = {word.lower(): word for word in _KNOWN[section]}
    near = difflib.get_close_matches(kind.lower(), lower, n=1, cutoff=0.75)
    return lower[near[0]] if near else ""


@enter("clipping-in-optimizer")
def _max_grad_norm(document: Document) -> Iterator[Finding]:
    """Gradients are clipped over all ranks before the optimizer sees them; an optimizer knows its own shard alone."""
    norm = read(document, "optimizer.params.max_grad_norm")
    if isinstance(norm, (int, float)) and norm > 0:
        yield "optimizer.params.max_grad_norm", "is not the optimizer's business", f"gradient_clipping: {norm:g}"


@enter("empty-param-group")
def _empty_groups(document: Document) -> Iterator[Finding]:
    """A rule for parameters says which it takes, and what is different for them."""
    rules = read(document, "optimizer.param_groups", {})
    for name, rule in rules.items() if isinstance(rules, dict) else ():
        place, conditions = ("optimizer", "param_groups", name), {"match", "min_ndim", "max_ndim"}
        if isinstance(rule, dict) and not conditions & rule.keys():
            yield place, "does not say which parameters it takes", 'match: ["*bias", "*norm*"], for example'
        elif isinstance(rule, dict) and not rule.keys() - conditions:
            yield place, "changes nothing for the parameters that it takes", "weight_decay: 0, for example"


@enter("optimizer-needs-closure")
def _closure(document: Document) -> Iterator[Finding]:
    """LBFGS evaluates the model itself, several times a step; accumulation and sharding leave no place for that."""
    if str(read(document, "optimizer.type", "")).upper() == "LBFGS":
        yield "optimizer.type", "LBFGS cannot be driven by a training loop", "use AdamW or SGD, for example"


@enter("rate-overruled", severity="warning")
def _rate(document: Document) -> Iterator[Finding]:
    """A warm-up to warmup_max_lr sets the rate itself: optimizer.params.lr is then never used.

    WarmupDecayLR goes to 0.001 where warmup_max_lr is not given, whatever the optimizer says.
    """
    own = read_number(read_params(document, "optimizer").get("lr"))
    kind, params = read(document, "scheduler.type"), read_params(document, "scheduler")
    highest = {"WarmupDecayLR": ("warmup_max_lr", 0.001), "WarmupLR": ("warmup_max_lr", None)}.get(str(kind))
    if highest is None or own is None:
        return
    name, default = highest
    rate = read_number(params.get(name, default))
    if rate is not None and rate != own:
        given = "" if name in params else " (the default)"
        message = f"{own:g} is never used: {kind} goes to {name} {rate:g}{given}"
        yield "optimizer.params.lr", message, f"scheduler.params.{name}: {own:g}, if that is what you mean"


@enter("warmup-backwards", severity="warning")
def _backwards(document: Document) -> Iterator[Finding]:
    """A warm-up that begins above its end lowers the rate."""
    params = read_params(document, "scheduler")
    for low, high in (("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr")):
        first, last = read_number(params.get(low)), read_number(params.get(high))
        if first is not None and last is not None and first > last:
            yield f"scheduler.params.{low}", f"{first:g} is above {high} {last:g}", "exchange the two?"


def _steps(document: Document) -> int | None:
    lengths = [read_params(document, "scheduler").get(key) for key in _TOTALS]
    known = [int(n) for n in (*lengths, read(document, "trainer.max_steps")) if isinstance(n, (int, float))]
    return min(known) if known else None


@enter("warmup-beyond-end", severity="warning")
def _long_warmup(document: Document) -> Iterator[Finding]:
    """A warm-up longer than the run never reaches its rate, and a decay after it never begins."""
    params, steps = read_params(document, "scheduler"), _steps(document)
    for key in ("warmup_num_steps", "num_warmup_steps"):
        warmup = read_number(params.get(key))
        if warmup is not None and steps is not None and warmup > steps:
            yield (
                f"scheduler.params.{key}",
                f"{warmup:g} is longer than the run, or the schedule, of {steps} steps",
                "shorten it",
            )


@enter("schedule-too-short", severity="warning", whole=True)
def _short_schedule(document: Document) -> Iterator[Finding]:
    """Steps after the end of a decay are taken at its lowest rate, which is usually 0: they change nothing."""
    params, steps = read_params(document, "scheduler"), read(document, "trainer.max_steps")
    for key in _TOTALS:
        total = read_number(params.get(key))
        if total is not None and isinstance(steps, int) and total < steps:
            message = f"{total:g} ends {steps - int(total)} steps before trainer.max_steps {steps}"
            yield f"scheduler.params.{key}", message, "leave it out: it is then the length of the run"


@enter("momentum-not-cycled", severity="warning")
def _cycled(document: Document) -> Iterator[Finding]:
    """OneCycle cycles the first beta; an optimizer that has none keeps its momentum."""
    asked = read_params(document, "scheduler").get("cycle_momentum") is True
    kind = str(read(document, "optimizer.type", "")).lower()
    if read(document, "scheduler.type") == "OneCycle" and asked and kind in ("sgd", "adagrad", "rmsprop"):
        yield (
            "scheduler.params.cycle_momentum",
            f"{read(document, 'optimizer.type')} has no betas to cycle",
            "leave it out",
        )


@enter("schedule-needs-evaluation", whole=True)
def _plateau(document: Document) -> Iterator[Finding]:
    """ReduceLROnPlateau looks at the evaluation loss: without evaluations on the way it never acts."""
    if read(document, "scheduler.type") == "ReduceLROnPlateau":
        if not read(document, "data.eval"):
            yield "scheduler.type", "ReduceLROnPlateau needs data.eval", "give data.eval and trainer.eval_every"
        elif not read(document, "trainer.eval_every"):
            yield "scheduler.type", "ReduceLROnPlateau needs trainer.eval_every", "trainer.eval_every: 100, for example"


@enter("schedule-incomplete")
def _incomplete(document: Document) -> Iterator[Finding]:
    """Some of transformers' schedules have no default for what makes them what they are."""
    kind, params = read(document, "scheduler.type"), read_params(document, "scheduler")
    if kind == "warmup_stable_decay" and "num_decay_steps" not in params:
        yield "scheduler", "warmup_stable_decay needs num_decay_steps", "a tenth of the steps is a usual share"
    floors = [key for key in ("min_lr", "min_lr_rate") if key in params]
    if kind == "cosine_with_min_lr" and len(floors) != 1:
        said = "has both min_lr and min_lr_rate" if floors else "needs min_lr or min_lr_rate"
        yield "scheduler", f"cosine_with_min_lr {said}", "min_lr_rate: 0.1 ends at a tenth of the rate"


@enter("no-total-steps", severity="error")
def _total(document: Document) -> Iterator[Finding]:
    """A job knows how many steps it takes; a program that calls `initialize` has to tell a schedule where it ends."""
    kind, params = read(document, "scheduler.type"), read_params(document, "scheduler")
    total = _TOTALS[0] if kind in ("WarmupDecayLR", "WarmupCosineLR") else _TOTALS[1]
    known = read(document, "scheduler.params.num_stable_steps") is not None
    if "model" in document or document.get("models") or known or (total == _TOTALS[1] and kind not in _ENDING):
        return
    if params.get(total, "auto") == "auto":
        place = f"scheduler.params.{total}" if total in params else "scheduler"
        yield place, f"needs {total}", "the optimizer steps that the program will take"
