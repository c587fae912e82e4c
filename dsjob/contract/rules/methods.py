"""Rules about optimizers and schedules."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from dsjob.contract.lengths import read_length
from dsjob.contract.paths import Path
from dsjob.contract.rules.table import Document, Finding, enter, read, read_number, read_params
from dsjob.contract.torch_names import OPTIMIZERS, SCHEDULES

_DEEPSPEED_OPTIMIZERS = (
    "adagrad", "adam", "adamw", "lamb", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd", "lion",
    "muon", "sgd",
)  # fmt: skip
_DEEPSPEED_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_ENDING = (  # those of transformers' schedules that need to know the number of steps
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
    """The type of an optimizer or schedule must be a name that DeepSpeed has (upper or lower case for optimizers) or a
    class of torch. Use a _target_ for any other.
    """
    for section, what in (("optimizer", "optimizer"), ("scheduler", "schedule")):
        kind = read(document, f"{section}.type")
        if isinstance(kind, str) and not _is_known(section, kind):
            meant = find_meant(section, kind)
            hint = (
                f'did you mean "{meant}"?' if meant else f"available: {', '.join(_KNOWN[section])}; or use a _target_"
            )
            yield f"{section}.type", f'unknown {what} "{kind}"', hint


def _is_known(section: str, kind: str) -> bool:
    return kind in _KNOWN[section] or (section == "optimizer" and kind.lower() in _DEEPSPEED_OPTIMIZERS)


def find_meant(section: str, kind: str) -> str:
    """The known type of optimizer or schedule (`section`) that is nearest to an unknown one; "" if `kind` is known, or
    if none is near."""
    if _is_known(section, kind):
        return ""
    lower = {word.lower(): word for word in _KNOWN[section]}
    near = difflib.get_close_matches(kind.lower(), lower, n=1, cutoff=0.75)
    return lower[near[0]] if near else ""


@enter("clipping-in-optimizer")
def _max_grad_norm(document: Document) -> Iterator[Finding]:
    """Gradients are clipped by their norm over all ranks before the optimizer runs. An optimizer only sees its
    shard."""
    norm = read(document, "optimizer.params.max_grad_norm")
    if isinstance(norm, (int, float)) and norm > 0:
        hint = f"use gradient_clipping: {norm:g}"
        yield "optimizer.params.max_grad_norm", "the optimizer does not clip gradients", hint


@enter("empty-param-group")
def _empty_groups(document: Document) -> Iterator[Finding]:
    """A rule for a parameter group must have conditions, and at least one argument that differs for the group."""
    rules = read(document, "optimizer.param_groups", {})
    for name, rule in rules.items() if isinstance(rules, dict) else ():
        place, conditions = ("optimizer", "param_groups", name), {"match", "min_ndim", "max_ndim"}
        if isinstance(rule, dict) and not conditions & rule.keys():
            yield place, "has no condition for its parameters", 'for example match: ["*bias", "*norm*"]'
        elif isinstance(rule, dict) and not rule.keys() - conditions:
            yield place, "changes nothing for its parameters", "add an argument, for example weight_decay: 0"


@enter("optimizer-needs-closure")
def _closure(document: Document) -> Iterator[Finding]:
    """LBFGS evaluates the model itself, several times per step, which gradient accumulation and sharding do not
    allow."""
    if str(read(document, "optimizer.type", "")).upper() == "LBFGS":
        message = "LBFGS is not supported: it evaluates the model itself"
        yield "optimizer.type", message, "use another optimizer, for example AdamW or SGD"


@enter("rate-overruled", severity="warning")
def _rate(document: Document) -> Iterator[Finding]:
    """Some schedules set the learning rates of all parameter groups themselves, so those of the optimizer and of its
    groups are never used. WarmupDecayLR does so without warmup_max_lr, too: it then warms up to 0.001.
    """
    kind, params, below = _read_method(document, "scheduler")
    verb, names = _SETTING.get(kind, ("", {}))
    own = read_number(_read_method(document, "optimizer")[1].get("lr"))
    rates = {name: _list_rates(params.get(name, default), own) for name, default in names.items()}
    if not rates or not all(rates.values()):  # not set, so groups keep their own, or unknown
        return
    shown = [
        f"{name} {', '.join(f'{rate:g}' for rate in found)}{'' if name in params else ' (the default)'}"
        for name, found in rates.items()
    ]
    for place, rate in _list_given_rates(document):
        if rate not in [each for found in rates.values() for each in found]:
            message = f"{rate:g} is never used: {kind} {verb} {' and '.join(shown)}"
            key = ".".join(map(str, (*below, list(names)[-1])))
            several = place[-1] != "lr" or "param_groups" in place
            value = " to a list with a rate for each parameter group" if several else f": {rate:g}"
            yield place, message, f"to use it, set {key}{value}"


_SETTING: dict[str, tuple[str, dict[str, float | None]]] = {  # what sets rates, the arguments that do, their defaults
    "WarmupLR": ("warms up to", {"warmup_max_lr": None}),
    "WarmupDecayLR": ("warms up to", {"warmup_max_lr": 0.001}),
    "LRRangeTest": ("starts at", {"lr_range_test_min_lr": 0.001}),
    "OneCycle": ("moves between", {"cycle_min_lr": None, "cycle_max_lr": None}),
    "OneCycleLR": ("rises to", {"max_lr": None}),
    "CyclicLR": ("moves between", {"base_lr": None, "max_lr": None}),
}


def _read_method(document: Document, section: str) -> tuple[str, dict[str, Any], Path]:
    """The name of an optimizer or schedule, its arguments, and where these are."""
    method = read(document, section, {})
    target = str(method.get("_target_", ""))
    if target.startswith("torch.optim."):
        return target.rpartition(".")[2], method, (section,)
    return str(method.get("type")), read_params(document, section), (section, "params")


def _list_rates(value: Any, own: float | None) -> list[float]:
    """The rates that an argument of a schedule sets; "auto" stands for the optimizer's `own`."""
    values = value if isinstance(value, list) else [own if value == "auto" else value]
    return [rate for each in values if (rate := read_number(each)) is not None]


def _list_given_rates(document: Document) -> Iterator[tuple[Path, float]]:
    """The rates that a document gives to an optimizer and its groups, each with its place."""
    _, params, below = _read_method(document, "optimizer")
    for key in ("lr", "muon_lr", "adam_lr"):
        if (rate := read_number(params.get(key))) is not None:
            yield (*below, key), rate
    groups = read(document, "optimizer.param_groups", {})
    for name, rule in groups.items() if isinstance(groups, dict) else ():
        rate = read_number(rule.get("lr")) if isinstance(rule, dict) else None
        if rate is not None:
            yield ("optimizer", "param_groups", name, "lr"), rate


@enter("warmup-backwards", severity="warning")
def _backwards(document: Document) -> Iterator[Finding]:
    """A warm-up whose start is above its end lowers the rate."""
    params = read_params(document, "scheduler")
    for low, high in (("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr")):
        first, last = read_number(params.get(low)), read_number(params.get(high))
        if first is not None and last is not None and first > last:
            yield f"scheduler.params.{low}", f"{first:g} is above {high} {last:g}", "did you swap the two?"


def _steps(document: Document) -> int | None:
    lengths = [read_params(document, "scheduler").get(key) for key in _TOTALS]
    known = [int(n) for n in (*lengths, read(document, "trainer.max_steps")) if isinstance(n, (int, float))]
    return min(known) if known else None


@enter("warmup-beyond-end", severity="warning")
def _long_warmup(document: Document) -> Iterator[Finding]:
    """A warm-up that is longer than the run never reaches its rate, and the decay after it never starts."""
    params, steps = read_params(document, "scheduler"), _steps(document)
    for key in ("warmup_num_steps", "num_warmup_steps"):
        warmup = read_number(params.get(key))
        if warmup is not None and steps is not None and warmup > steps:
            yield (
                f"scheduler.params.{key}",
                f"{warmup:g} is longer than the run or the schedule, which has {steps} steps",
                "shorten it",
            )


@enter("warmup-of-zero", severity="warning")
def _no_warmup(document: Document) -> Iterator[Finding]:
    """DeepSpeed's schedules have at least two steps of warm-up. DeepSpeed refuses 0 since 0.19.6."""
    if read_params(document, "scheduler").get("warmup_num_steps") == 0:
        message = "0 acts as 2, as in DeepSpeed before 0.19.6: the first two steps use the lowest rate"
        hint = "for a constant rate from the first step, leave out the section scheduler"
        yield "scheduler.params.warmup_num_steps", message, hint


@enter("length-unknown", whole=True)
def _unknown_length(document: Document) -> Iterator[Finding]:
    """Tokens and time do not tell the number of steps. A schedule that ends with the run needs that number at the
    start."""
    trainer, params = read(document, "trainer", {}), read_params(document, "scheduler")
    value = read(document, "trainer.max_length")
    if value is None or not read_length(value).measured or {"max_steps", "max_epochs"} & trainer.keys():
        return
    kind = read(document, "scheduler.type")
    total = _TOTALS[0] if kind in ("WarmupDecayLR", "WarmupCosineLR") else _TOTALS[1]
    if (total == _TOTALS[0] or kind in _ENDING) and params.get(total, "auto") == "auto":
        hint = f"set scheduler.params.{total}, or trainer.max_steps, which is then an upper bound"
        yield "trainer.max_length", f"{value} does not tell the number of steps, which {kind} needs", hint


@enter("schedule-too-short", severity="warning", whole=True)
def _short_schedule(document: Document) -> Iterator[Finding]:
    """Steps after the end of a decay use its lowest rate. That is usually 0, so they change nothing."""
    params, steps = read_params(document, "scheduler"), read(document, "trainer.max_steps")
    for key in _TOTALS:
        total = read_number(params.get(key))
        if total is not None and isinstance(steps, int) and total < steps:
            message = f"{total:g} ends {steps - int(total)} steps before trainer.max_steps {steps}"
            yield f"scheduler.params.{key}", message, "leave it out, and the schedule lasts as long as the run"


@enter("momentum-not-cycled", severity="warning")
def _cycled(document: Document) -> Iterator[Finding]:
    """OneCycle cycles the first beta. An optimizer without betas keeps its momentum unchanged."""
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
    """ReduceLROnPlateau depends on the evaluation loss. Without evaluations during the run it never changes the
    rate."""
    if read(document, "scheduler.type") == "ReduceLROnPlateau":
        if not read(document, "data.eval"):
            yield "scheduler.type", "ReduceLROnPlateau needs data.eval", "set data.eval and trainer.eval_every"
        elif not read(document, "trainer.eval_every"):
            yield "scheduler.type", "ReduceLROnPlateau needs trainer.eval_every", "for example trainer.eval_every: 100"


@enter("schedule-incomplete")
def _incomplete(document: Document) -> Iterator[Finding]:
    """Some of transformers' schedules have no default for their most important arguments."""
    kind, params = read(document, "scheduler.type"), read_params(document, "scheduler")
    if kind == "warmup_stable_decay" and "num_decay_steps" not in params:
        yield "scheduler", "warmup_stable_decay needs num_decay_steps", "a tenth of the steps is usual"
    floors = [key for key in ("min_lr", "min_lr_rate") if key in params]
    if kind == "cosine_with_min_lr" and len(floors) != 1:
        wrong = "has both min_lr and min_lr_rate" if floors else "needs min_lr or min_lr_rate"
        yield "scheduler", f"cosine_with_min_lr {wrong}", "min_lr_rate: 0.1 ends at a tenth of the rate"


@enter("no-total-steps", severity="error")
def _total(document: Document) -> Iterator[Finding]:
    """A job knows its number of steps. A program that calls `initialize` must tell the schedule where it ends."""
    kind, params = read(document, "scheduler.type"), read_params(document, "scheduler")
    total = _TOTALS[0] if kind in ("WarmupDecayLR", "WarmupCosineLR") else _TOTALS[1]
    known = read(document, "scheduler.params.num_stable_steps") is not None
    if "model" in document or document.get("models") or known or (total == _TOTALS[1] and kind not in _ENDING):
        return
    if params.get(total, "auto") == "auto":
        wrong = '"auto" has no meaning here' if total in params else f"needs {total}"
        place = f"scheduler.params.{total}" if total in params else "scheduler"
        yield place, wrong, "set it to the number of optimizer steps that the program takes"
