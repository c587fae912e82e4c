"""Translates the Trainer's optimizers to those of DeepSpeed, torch or transformers."""

from __future__ import annotations

import re

from dsjob.importing.command_line import parse_value
from dsjob.importing.given import Draft, Given, Rank, Settings, differs, is_off

_ADAM = re.compile(r"adamw?$", re.IGNORECASE)
# --optim: the type or _target_, and what is lost in the translation.
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


def draft_optimizer(settings: Settings, draft: Draft) -> None:
    """Adds the optimizer and its arguments to the draft. `settings`: from `fill_settings`."""
    named = _name_optimizer(settings, draft)
    name = str(named.value)
    kind, lost = OPTIMIZERS.get(name, ("AdamW", "replaced by AdamW: results and the best learning rate will differ"))
    from_file = draft.best("optimizer.type")
    if from_file is not None and named.rank == Rank.DEFAULT:
        kind = str(from_file.value)
        if lost:
            draft.note("left out", f"{named.label}: {from_file} takes precedence", named)
    else:
        if lost:
            draft.note("changed", f"{named.label}: {lost}", named)
        _draft_kind(kind, named, from_file, draft)
    params = "optimizer" if "." in kind else "optimizer.params"
    for argument, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        draft.number(settings[argument])
        draft.put(f"{params}.{key}", settings[argument])
    first, second, eps = settings["adam_beta1"], settings["adam_beta2"], settings["adam_epsilon"]
    if _ADAM.search(kind):
        betas = [draft.number(first), draft.number(second)]
        draft.put("optimizer.params.betas", max(first, second, key=lambda given: given.rank).to(betas))
        draft.number(eps)
        draft.put("optimizer.params.eps", eps)
    else:
        for given in (first, second, eps):
            if given.rank > Rank.DEFAULT:
                draft.note("left out", f"{given.label}: {kind} has no such argument", given)
    _draft_optim_args(settings["optim_args"], params, draft)


def _name_optimizer(settings: Settings, draft: Draft) -> Given:
    """The argument that names the optimizer: `optim`, or the old switch `adafactor`."""
    switch, named = settings["adafactor"], settings["optim"]
    if switch.value is not True:
        return named
    if named.rank > Rank.DEFAULT and differs(named.value, "adafactor"):
        draft.note("conflict", f"optimizer: {switch} overrides {named}, as in the Trainer")
    return switch.to("adafactor")


def _draft_kind(kind: str, named: Given, from_file: Given | None, draft: Draft) -> None:
    if "." not in kind:
        draft.put("optimizer.type", named.to(kind))
        drop_params("optimizer", from_file, kind, draft)
        return
    replace_section("optimizer", from_file, kind, draft)
    draft.put("optimizer._target_", named.to(kind))
    for key, value in _TARGET_ARGUMENTS.get(kind, {}).items():
        draft.put(f"optimizer.{key}", named.to(value))


def _draft_optim_args(given: Given, params: str, draft: Draft) -> None:
    if is_off(given.value):
        return
    for pair in str(given.value).replace(" ", "").split(","):
        name, equals, value = pair.partition("=")
        if not (isinstance(given.value, str) and name and equals):
            draft.refuse(given, "must be name=value pairs, separated by commas")
            return
        draft.put((*params.split("."), name), given.to(parse_value(value)))


def drop_params(section: str, from_file: Given | None, kind: str, draft: Draft) -> None:
    """Removes the arguments that a file gives for another type, because they do not fit this one."""
    before = str(from_file.value) if from_file is not None else kind
    if before.lower() == kind.lower() or (_ADAM.fullmatch(before) and _ADAM.fullmatch(kind)):
        return
    paths = [path for path in draft.values if path[:2] == (section, "params")]
    dropped = [given for path in paths for given in draft.values.pop(path)]
    labels = [given.label for given in dropped if given.value != "auto" and given.rank > Rank.DEFAULT]
    if labels:
        draft.note("left out", f"{', '.join(labels)}: for {before}, which {kind} replaces", dropped[0])


def replace_section(section: str, from_file: Given | None, kind: str, draft: Draft) -> None:
    """Removes everything that a file gives for the section, because a target replaces it."""
    drop_params(section, from_file, kind, draft)
    if from_file is not None:
        del draft.values[section, "type"]
        draft.note("conflict", f"{section}: {kind} overrides {from_file}")
