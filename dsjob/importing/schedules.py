"""The Trainer's schedules, which have the same names in dsjob, and how the Trainer changes a DeepSpeed file's
schedule."""

from __future__ import annotations

import math

from dsjob.contract.hints import suggest
from dsjob.errors import how_to_install
from dsjob.importing.command_line import parse_value
from dsjob.importing.given import UNKNOWN, Draft, Given, Rank, Settings, is_off
from dsjob.importing.methods import drop_params, replace_section

_COSINE_LR_RATE = "transformers.get_cosine_with_min_lr_schedule_with_warmup_lr_rate"
# --lr_scheduler_type: dsjob's schedule of the same name, or a function of transformers.
SCHEDULES: dict[str, str] = {
    **{
        name: name
        for name in (
            "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant",
            "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay",
        )
    },
    "cosine_warmup_with_min_lr": _COSINE_LR_RATE,
}  # fmt: skip
_WITHOUT = ("reduce_lr_on_plateau", "greedy")  # without an equivalent: they depend on the loss, not on the step
_WARMUP, _WARMUP_DECAY, _WARMUP_COSINE = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"  # DeepSpeed's
_TOTAL = "num_training_steps"
_UNFILLED = "is a share of all steps, whose number is unknown"


def draft_schedule(settings: Settings, total: int | None, draft: Draft) -> None:
    """Adds the schedule to the draft. `total`: number of optimizer steps of the run, if known."""
    named = settings["lr_scheduler_type"]
    options = _read_options(settings["lr_scheduler_kwargs"], draft)
    warmup = _count_warmup(settings, total, draft)
    from_file = draft.best("scheduler.type")
    name = str(named.value).rpartition(".")[2].lower()
    kind = SCHEDULES.get(name)
    if kind is None:
        _note_unknown(named, name, from_file, draft)
    if from_file is not None and (kind is None or named.rank == Rank.DEFAULT):
        _tune_file_schedule(from_file, settings, warmup, total, draft)
        _drop_options(options, f"the schedule is {from_file}", draft)
        return
    if from_file is not None:
        text = f"the Trainer itself would keep {from_file.label}; to keep it, leave out {named.name}"
        draft.note("changed", text, named)
    kind = kind or "constant"
    if "." in kind:
        _draft_target(kind, from_file, named, warmup, total, draft)
        for given in options:
            draft.put(("scheduler", given.name.rpartition(".")[2]), given)
        return
    draft.put("scheduler.type", named.to(kind))
    drop_params("scheduler", from_file, kind, draft)
    if kind == "constant" and warmup.value and warmup.rank > Rank.DEFAULT:
        draft.note("left out", f"{warmup.label}: {name} has no warm-up; use constant_with_warmup", warmup)
    if kind.startswith("constant"):
        _drop_options(options, f"{name} takes no arguments", draft)
        options = []
    if kind != "constant":
        _draft_warmup("num_warmup_steps", warmup, draft)
    for given in options:  # num_training_steps is not set, so the schedule lasts as long as the run, as in the Trainer
        draft.put(("scheduler", "params", given.name.rpartition(".")[2]), given)


def _note_unknown(named: Given, name: str, from_file: Given | None, draft: Draft) -> None:
    stands = f"{from_file.label} is kept" if from_file is not None else "the rate stays constant"
    if name in _WITHOUT:
        draft.note("left out", f"{named.label} has no equivalent: {stands}", named)
    else:
        hint = suggest(name, list(SCHEDULES)) or "has no equivalent"
        draft.note("unknown", f"{named.label}: {hint}; {stands}", named)


def _read_options(kwargs: Given, draft: Draft) -> list[Given]:
    """The schedule's other arguments, each under its own name."""
    content = parse_value(kwargs.value) if isinstance(kwargs.value, str) else kwargs.value
    if is_off(content):
        return []
    if not isinstance(content, dict):
        draft.refuse(kwargs, 'must be an object, for example {"num_cycles": 2}')
        return []
    options = []
    for key, value in content.items():
        given = Given(value, f"{kwargs.name}.{key}", kwargs.place, kwargs.rank)
        if key in ("num_warmup_steps", _TOTAL):
            other = "warmup_steps" if key == "num_warmup_steps" else "max_steps"
            draft.refuse(given, f"must not be set here: use {other}")
        elif value is not None:
            options.append(given)
    return options


def _drop_options(options: list[Given], why: str, draft: Draft) -> None:
    for given in options:
        draft.note("left out", f"{given.label}: {why}", given)


def _draft_target(
    kind: str, from_file: Given | None, named: Given, warmup: Given, total: int | None, draft: Draft
) -> None:
    replace_section("scheduler", from_file, kind, draft)
    draft.put("scheduler._target_", named.to(kind))
    draft.note("changed", f"{named.label} is transformers' own function: {how_to_install('transformers')}", named)
    draft.put("scheduler.num_warmup_steps", warmup if warmup.value != "auto" else warmup.to(UNKNOWN))
    if warmup.value == "auto":
        draft.note("fill in", f"scheduler.num_warmup_steps: {warmup.label} {_UNFILLED}", warmup)
    draft.put(f"scheduler.{_TOTAL}", named.to(total or UNKNOWN))
    if total is None:
        draft.note("fill in", f"scheduler.{_TOTAL}: the number of optimizer steps of the run", named)


def _count_warmup(settings: Settings, total: int | None, draft: Draft) -> Given:
    """The number of warm-up steps; "auto" if they are a share of an unknown total."""
    steps, ratio = settings["warmup_steps"], settings["warmup_ratio"]
    count = 0 if is_off(steps.value) else draft.number(steps)
    part = 0 if is_off(ratio.value) else draft.number(ratio)
    if count < 0:
        draft.refuse(steps, "must be at least 0", rule="range")
    if not 0 <= part <= 1:
        draft.refuse(ratio, "must be between 0 and 1", rule="range")
    if count > 0 and part:
        draft.note("left out", f"{ratio.label}: {steps.label} takes precedence", ratio)
    if count >= 1:
        return steps.to(draft.whole(steps))
    share, part = (steps, count) if count > 0 else (ratio, part)
    if part <= 0:
        return steps.to(0)
    return share.to("auto" if total is None else math.ceil(total * part))


def _draft_warmup(key: str, warmup: Given, draft: Draft, least: int = 0) -> None:
    path = ("scheduler", "params", key)
    if warmup.value == "auto":  # in the document, "auto" would mean no warm-up
        draft.unfilled.add(path)
        draft.note("fill in", f"{'.'.join(path)}: {warmup.label} {_UNFILLED}", warmup)
    draft.put(path, warmup.to(UNKNOWN if warmup.value == "auto" else max(least, warmup.value)))


def _tune_file_schedule(from_file: Given, settings: Settings, warmup: Given, total: int | None, draft: Draft) -> None:
    """Like the Trainer, overrides numbers of the schedule in a DeepSpeed file, but not the schedule itself."""
    kind, explicit = str(from_file.value), warmup.rank > Rank.DEFAULT
    if kind in (_WARMUP, _WARMUP_DECAY):
        draft.put("scheduler.params.warmup_max_lr", settings["learning_rate"])
        draft.put("scheduler.params.warmup_min_lr", Given(0, "", "", Rank.DEFAULT))
    if kind in (_WARMUP, _WARMUP_DECAY, _WARMUP_COSINE):
        in_file = draft.values.get(("scheduler", "params", "warmup_num_steps"), ())
        if warmup.value != "auto" or any(given.value == "auto" for given in in_file):
            _draft_warmup("warmup_num_steps", warmup, draft, least=1)
        else:
            draft.note("left out", f"{warmup.label} {_UNFILLED}; {from_file} has its own", warmup)
    elif explicit and warmup.value:
        draft.note("left out", f"{warmup.label}: {from_file} has a warm-up of its own", warmup)
    if kind in (_WARMUP_DECAY, _WARMUP_COSINE):
        _draft_total(settings["max_steps"], total, draft)


def _draft_total(steps: Given, total: int | None, draft: Draft) -> None:
    path = "scheduler.params.total_num_steps"
    known = draft.best(path)
    if total is not None and (known is None or steps.rank > Rank.DEFAULT):
        draft.put(path, steps.to(total))
    elif known is None:
        draft.put(path, steps.to("auto"))
