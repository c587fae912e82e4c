"""The Trainer's optimizers and schedules as DeepSpeed's, torch's or transformers' own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dsjob.importing.command_line import parse_value
from dsjob.importing.given import PRECEDENCE, UNKNOWN, Draft, Given, Rank, Settings, is_off

_ADAM = re.compile(r"adamw?$", re.IGNORECASE)
# --optim: {type} or {_target_}, and what is lost on the way.
OPTIMIZERS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_hf",
         "adamw_apex_fused"),
        ("AdamW", ""),
    ),
    "adafactor": ("transformers.Adafactor", ""),
    "sgd": ("SGD", ""),
    "adagrad": ("Adagrad", ""),
    "rmsprop": ("RMSprop", ""),
    "adamw_anyprecision": ("AdamW", "its states stay in fp32"),
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "paged_adamw", "paged_adamw_8bit"),
        ("AdamW", "its states stay in fp32"),
    ),
    "paged_adamw_32bit": ("AdamW", "its states are not paged"),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), ("RMSprop", "its states stay in fp32")),
}  # fmt: skip
_TARGET_ARGUMENTS = {"transformers.Adafactor": {"scale_parameter": False, "relative_step": False}}

# --lr_scheduler_type: DeepSpeed's schedule, or a function of transformers that takes the optimizer.
_WARMUP_DECAY, _WARMUP_COSINE = "WarmupDecayLR", "WarmupCosineLR"
SCHEDULES: dict[str, str] = {
    "linear": _WARMUP_DECAY,
    "cosine": _WARMUP_COSINE,
    "cosine_with_min_lr": _WARMUP_COSINE,
    "cosine_warmup_with_min_lr": _WARMUP_COSINE,
    "constant": "",
    "constant_with_warmup": "WarmupLR",
    "cosine_with_restarts": "transformers.get_cosine_with_hard_restarts_schedule_with_warmup",
    "polynomial": "transformers.get_polynomial_decay_schedule_with_warmup",
    "inverse_sqrt": "transformers.get_inverse_sqrt_schedule",
    "warmup_stable_decay": "transformers.get_wsd_schedule",
}
_TOTAL = "num_training_steps"
_WITHOUT = "has no equivalent: the rate stays constant"


def name_optimizer(settings: Settings) -> Given:
    """The argument that names the optimizer: `optim`, or the old switch `adafactor`."""
    switch = settings.get("adafactor")
    if switch is not None and switch.value is True:
        return switch.to("adafactor")
    return settings["optim"]


def draft_optimizer(settings: Settings, draft: Draft) -> None:
    """Puts the optimizer and its arguments into the draft. `settings`: every row of the table that it reads."""
    named = name_optimizer(settings)
    name = str(named.value)
    kind, lost = OPTIMIZERS.get(name, ("AdamW", "AdamW stands in for it: other results, and another learning rate"))
    if lost:
        draft.note("changed", f"{named.name} {name}: {lost}", named)
    from_file = draft.best("optimizer.type")
    if from_file is not None and named.rank == Rank.DEFAULT:
        kind = str(from_file.value)
    elif "." not in kind:
        draft.put("optimizer.type", named.to(kind))
        _drop_other_params("optimizer", from_file, kind, draft)
    else:
        draft.put("optimizer._target_", named.to(kind))
        for key, value in _TARGET_ARGUMENTS.get(kind, {}).items():
            draft.put(f"optimizer.{key}", named.to(value))
        _replace_section("optimizer", from_file, kind, draft)
    params = "optimizer" if "." in kind else "optimizer.params"
    for argument, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        draft.put(f"{params}.{key}", settings[argument])
    if _ADAM.search(kind):
        first, second = settings["adam_beta1"], settings["adam_beta2"]
        betas = [first.number(), second.number()]
        draft.put("optimizer.params.betas", max(first, second, key=lambda given: given.rank).to(betas))
        draft.put("optimizer.params.eps", settings["adam_epsilon"])
    _draft_optim_args(settings.get("optim_args"), params, draft)


def _draft_optim_args(given: Given | None, params: str, draft: Draft) -> None:
    if given is None or is_off(given.value):
        return
    for pair in str(given.value).replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        draft.put(f"{params}.{name}", given.to(parse_value(value)))


def _drop_other_params(section: str, from_file: Given | None, kind: str, draft: Draft) -> None:
    """Arguments that a file gives for another type are of no use to this one."""
    before = str(from_file.value) if from_file is not None else kind
    if before.lower() == kind.lower() or (_ADAM.fullmatch(before) and _ADAM.fullmatch(kind)):
        return
    for path in [path for path in draft.values if path[:2] == (section, "params")]:
        for given in draft.values.pop(path):
            draft.note("left out", f"{given.name} belongs to {before}, which {kind} replaces", given)


def _replace_section(section: str, from_file: Given | None, kind: str, draft: Draft) -> None:
    """A target takes the place of all that a file says of the section."""
    _drop_other_params(section, from_file, kind, draft)
    if from_file is not None:
        del draft.values[section, "type"]
        draft.note("conflict", f"{section}: {kind} wins over {from_file}: {PRECEDENCE}")


def draft_schedule(settings: Settings, total: int | None, draft: Draft) -> None:
    """Puts the schedule into the draft; `total`: optimizer steps of the run, where they are known."""
    named, kwargs = settings["lr_scheduler_type"], settings["lr_scheduler_kwargs"]
    warmup = _count_warmup(settings, total)
    from_file = draft.best("scheduler.type")
    if from_file is not None and named.rank == Rank.DEFAULT:
        _tune_file_schedule(str(from_file.value), settings, warmup, total, draft)
        return
    if from_file is not None:
        text = f"the Trainer itself keeps to {from_file.told}: leave out {named.name} to have that"
        draft.note("changed", text, named)
    options = dict(kwargs.value) if isinstance(kwargs.value, dict) else {}
    name = str(named.value).rpartition(".")[2].lower()
    if name == "cosine_with_restarts" and options in ({}, {"num_cycles": 1}):
        name, options = "cosine", {}  # one cycle is the plain cosine
    kind = SCHEDULES.get(name)
    if not kind:
        _draft_constant(kind is not None, named, warmup, draft)
        _replace_section("scheduler", from_file, "a constant rate", draft)
    elif "." in kind:
        _replace_section("scheduler", from_file, kind, draft)
        _draft_target(kind, named, options, warmup, total, draft)
    else:
        draft.put("scheduler.type", named.to(kind))
        _drop_other_params("scheduler", from_file, kind, draft)
        _draft_params(kind, settings, options, draft)
        _draft_warmup(warmup, draft)
        if kind != "WarmupLR":
            _draft_total(total, named, draft)


def _draft_constant(known: bool, named: Given, warmup: Given, draft: Draft) -> None:
    if not known:
        draft.note("left out", f"{named.name} {named.value} {_WITHOUT}", named)
    if warmup.value and warmup.rank > Rank.DEFAULT:
        draft.note("left out", f"{warmup.name}: a constant rate has no warm-up, constant_with_warmup has", warmup)


def _draft_params(kind: str, settings: Settings, options: dict[str, Any], draft: Draft) -> None:
    """The arguments of one of DeepSpeed's schedules, but for its steps."""
    named, kwargs = settings["lr_scheduler_type"], settings["lr_scheduler_kwargs"]
    draft.put("scheduler.params.warmup_type", named.to("linear"))
    if kind == _WARMUP_COSINE:
        _draft_cosine(settings, options, draft)
    else:
        draft.put("scheduler.params.warmup_max_lr", settings["learning_rate"])
    for option, value in options.items():
        draft.note("left out", f"lr_scheduler_kwargs.{option}={value} has no counterpart in {kind}", kwargs)


def _draft_cosine(settings: Settings, options: dict[str, Any], draft: Draft) -> None:
    """Takes what it reads out of `options`."""
    kwargs, rate = settings["lr_scheduler_kwargs"], settings["learning_rate"]
    ratio, lowest, start = (options.pop(name, None) for name in ("min_lr_rate", "min_lr", "warmup_lr_rate"))
    if ratio is None and lowest is not None:
        ratio = kwargs.to(lowest).number() / (rate.number() or 1)
    draft.put("scheduler.params.cos_min_ratio", kwargs.to(0.0 if ratio is None else ratio))
    if start is not None:
        draft.put("scheduler.params.warmup_min_ratio", kwargs.to(start))
    if options.get("num_cycles") == 0.5:
        del options["num_cycles"]


def _draft_target(
    kind: str, named: Given, options: Mapping[str, Any], warmup: Given, total: int | None, draft: Draft
) -> None:
    draft.put("scheduler._target_", named.to(kind))
    draft.note("changed", f"{named.name} {named.value} is transformers' own function: pip install 'dsjob[hf]'", named)
    draft.put("scheduler.num_warmup_steps", warmup if warmup.value != "auto" else warmup.to(UNKNOWN))
    if warmup.value == "auto":
        draft.note("fill in", f"scheduler.num_warmup_steps: {warmup.name} of all steps", warmup)
    if "inverse_sqrt" not in kind:
        draft.put(f"scheduler.{_TOTAL}", named.to(total or UNKNOWN))
        if total is None:
            draft.note("fill in", f"scheduler.{_TOTAL}: the number of optimizer steps of the run", named)
    for key, value in options.items():
        draft.put(f"scheduler.{key}", named.to(value))


def _count_warmup(settings: Settings, total: int | None) -> Given:
    """Steps of warm-up; "auto" where they are a share of a total that nobody knows."""
    steps, ratio = settings["warmup_steps"], settings["warmup_ratio"]
    if not is_off(steps.value) and steps.number() >= 1:
        return steps.to(int(steps.number()))
    share = steps if not is_off(steps.value) and steps.number() > 0 else ratio
    if is_off(share.value) or not share.number():
        return steps.to(0)
    return share.to("auto" if total is None else -int(-total * share.number() // 1))


def _draft_warmup(warmup: Given, draft: Draft) -> None:
    if warmup.value == "auto":
        _draft_unknown_warmup(warmup, draft)
    steps = UNKNOWN if warmup.value == "auto" else max(1, warmup.value)  # "auto" itself would stand for no warm-up
    draft.put("scheduler.params.warmup_num_steps", warmup.to(steps))


def _draft_unknown_warmup(warmup: Given, draft: Draft) -> None:
    draft.unfilled.add(("scheduler", "params", "warmup_num_steps"))
    draft.note(
        "fill in",
        f"scheduler.params.warmup_num_steps: {warmup.name} says a share of all steps, their number is not known",
        warmup,
    )


def _draft_total(total: int | None, named: Given, draft: Draft) -> None:
    draft.put("scheduler.params.total_num_steps", named.to("auto" if total is None else total))


def _tune_file_schedule(kind: str, settings: Settings, warmup: Given, total: int | None, draft: Draft) -> None:
    """The Trainer overrides numbers of a schedule that a DeepSpeed file names, not the schedule."""
    if kind in ("WarmupLR", _WARMUP_DECAY):
        draft.put("scheduler.params.warmup_max_lr", settings["learning_rate"])
        draft.put("scheduler.params.warmup_min_lr", settings["learning_rate"].as_default(0))
    if kind in ("WarmupLR", _WARMUP_DECAY, _WARMUP_COSINE):
        in_file = draft.values.get(("scheduler", "params", "warmup_num_steps"), ())
        if warmup.value == "auto":
            if any(given.value == "auto" for given in in_file):
                _draft_unknown_warmup(warmup, draft)
        else:
            draft.put("scheduler.params.warmup_num_steps", warmup.to(max(1, warmup.value)))
    if kind in (_WARMUP_DECAY, _WARMUP_COSINE):
        path = ("scheduler", "params", "total_num_steps")
        given = settings["max_steps"]
        known = draft.best(".".join(path))
        if total is not None and (known is None or given.rank > Rank.DEFAULT):
            draft.put(path, given.to(total))
        elif known is None:
            _draft_total(total, settings["max_steps"], draft)
