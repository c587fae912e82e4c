"""The Trainer's arguments, from a file or a command, as values of the job document.

Unset arguments have the Trainer's defaults, at the lowest rank. `contract.trainer_arguments` is the table of arguments
and keys; the functions here read arguments that belong together.
"""

from __future__ import annotations

import math
import re
from typing import Any

from dsjob.contract.hints import suggest
from dsjob.contract.trainer_arguments import ARGUMENTS, FORMER_DEFAULTS, SCRIPT_ARGUMENTS
from dsjob.importing.evaluating import draft_evaluating
from dsjob.importing.given import Draft, Given, Rank, Settings, differs, is_off, join
from dsjob.importing.methods import draft_optimizer
from dsjob.importing.schedules import draft_schedule
from dsjob.importing.services import draft_services

_TABLE = {**ARGUMENTS, **SCRIPT_ARGUMENTS}
# Old spellings, which are read as the new ones.
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "max_val_samples": "max_eval_samples",
    "max_test_samples": "max_predict_samples",
}
_STAGES = {
    "simple": 2, "zero_dp_2": 2, "zero_dp_3": 3,
    "full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2,
}  # fmt: skip


def sort_arguments(found: Settings, draft: Draft) -> tuple[Settings, Settings]:
    """Splits arguments into those of the Trainer and those of the script. Notes unknown ones with a suggestion."""
    trainer: Settings = {}
    script: Settings = {}
    for name, given in found.items():
        if name.startswith("no_") and name[3:] in ARGUMENTS and given.value is True:
            name, given = name[3:], given.to(False)
        known = name if name in _TABLE else _complete(name)
        known = _RENAMED.get(known or "", known)
        if known in ARGUMENTS:
            join(trainer, [(known, given)], draft)
        elif known in SCRIPT_ARGUMENTS:
            join(script, [(known, given)], draft)
        else:
            hint = suggest(name, list(_TABLE))
            draft.note("unknown", f"{given.label}: {hint or 'not an argument of the Trainer or of its scripts'}", given)
    return trainer, script


def _complete(name: str) -> str | None:
    """The full name for an unambiguous prefix, which argparse accepts; None if there is none."""
    longer = [known for known in _TABLE if known.startswith(name)] if len(name) > 4 else []
    return longer[0] if len(longer) == 1 else None


def fill_settings(given: Settings, draft: Draft) -> Settings:
    """Every argument of the Trainer, as given or with its default. In a file, a value equal to the default counts as
    the default, because a dump holds all arguments."""
    filled = {}
    for name, row in ARGUMENTS.items():
        default = Given(row.default, f"--{name}", "the Trainer's default", Rank.DEFAULT)
        found = _read_switch(given[name], row.default, draft) if name in given else default
        former = found.value in FORMER_DEFAULTS.get(name, ())
        if found.rank == Rank.ARGUMENTS and (former or not differs(found.value, row.default)):
            found = Given(found.value, found.name, found.place, Rank.DEFAULT)  # a dump holds every argument
        filled[name] = found
    return filled


def _read_switch(given: Given, default: Any, draft: Draft) -> Given:
    """For a boolean argument, interprets the words that the Trainer accepts for true and false."""
    if not isinstance(default, bool) or isinstance(given.value, bool) or given.value is None:
        return given
    return given.to(draft.switch(given))


def draft_arguments(settings: Settings, ranks: int | None, samples: int | None, draft: Draft) -> None:
    """Adds the values of the arguments to the draft.

    `settings`: from `fill_settings`. `ranks`: number of processes, and `samples`: size of the training set, if known.
    """
    for name, row in ARGUMENTS.items():
        given = settings[name]
        if row.carried and given.value is not None:
            draft.put(row.keys[0], given)
        elif not row.keys and row.about and given.rank > Rank.DEFAULT and differs(given.value, row.default):
            draft.note("left out", f"{given.label}: {row.about}", given)
    total = _draft_length(settings, ranks, samples, draft)
    for part in (
        _draft_precision,
        _draft_spread,
        _draft_blocks,
        _draft_device,
        _draft_resume,
        _draft_name,
        _draft_targets,
        _draft_guard,
        draft_services,
        draft_optimizer,
    ):
        part(settings, draft)
    draft_schedule(settings, total, draft)
    draft_evaluating(settings, total, draft)


def _draft_length(settings: Settings, ranks: int | None, samples: int | None, draft: Draft) -> int | None:
    """Adds the end of training to the draft. Returns the number of optimizer steps if it is known."""
    steps, epochs = settings["max_steps"], settings["num_train_epochs"]
    if not is_off(steps.value) and draft.number(steps) > 0:
        draft.put("trainer.max_steps", steps.to(draft.whole(steps)))
        if epochs.rank > Rank.DEFAULT:
            draft.note("left out", f"{epochs.label}: {steps.label} takes precedence", epochs)
        return draft.whole(steps)
    draft.put("trainer.max_epochs", epochs)
    known = [
        draft.best(path) or settings[name]
        for path, name in (
            ("trainer.micro_batch", "per_device_train_batch_size"),
            ("trainer.grad_accum", "gradient_accumulation_steps"),
        )
    ]
    parts = [given.value for given in (*known, epochs)]
    if ranks is None or samples is None or draft.best("trainer.train_batch"):
        return None
    if not all(isinstance(part, (int, float)) and part > 0 for part in parts):
        return None  # the check of the document reports it
    total: int = math.ceil(samples * parts[2] / (parts[0] * parts[1] * ranks))
    return max(1, total)


_BACKENDS = ("auto", "amp", "cuda_amp", "cpu_amp", "apex")


def _draft_precision(settings: Settings, draft: Draft) -> None:
    fp16, level = settings["fp16"], settings["fp16_opt_level"]
    backends = [settings[name] for name in ("half_precision_backend", "fp16_backend")]
    apex = next((given for given in backends if given.value == "apex"), None)
    for given in backends:
        if given.value not in _BACKENDS and not is_off(given.value):
            draft.refuse(given, f"must be one of {', '.join(_BACKENDS)}", rule="enum")
    draft.put("bf16.enabled", settings["bf16"])
    tf32 = settings["tf32"]
    if tf32.value is not None:
        draft.put("trainer.matmul_precision", tf32.to("high" if tf32.value else "highest"))
    if apex is not None and fp16.value:
        draft.put("amp.enabled", apex.to(True))
        spelt = str(level.value or "O1").replace("0", "O", 1) if str(level.value).startswith("0") else level.value
        draft.put("amp.opt_level", level.to(spelt))
        draft.put("fp16.enabled", fp16.as_default(False))
        return
    draft.put("fp16.enabled", fp16)
    if apex is not None:
        draft.note("left out", f"{apex.label}: no effect without fp16", apex)
    if level.rank > Rank.DEFAULT:
        draft.note("left out", f"{level.label}: only used with apex", level)


def _draft_spread(settings: Settings, draft: Draft) -> None:
    for name in ("sharded_ddp", "fsdp"):
        given = settings[name]
        if is_off(given.value):
            continue
        value = "full_shard" if given.value is True or given.value == "true" else given.value
        words = value if isinstance(value, list) else str(value).replace(",", " ").split()
        draft_sharding([str(word).lower() for word in words], given, draft)
    config = settings["fsdp_config"]
    if isinstance(config.value, dict):
        named = {key: Given(value, key, config.place, config.rank) for key, value in config.value.items()}
        draft_fsdp_config(named, draft)
    elif isinstance(config.value, str) and config.value:
        text = "the file is not read: pass its contents instead of its name"
        draft.note("left out", f"{config.label}: {text}", config)
    elif not is_off(config.value):
        draft.refuse(config, "must be an object, or the name of a file")


def _draft_blocks(settings: Settings, draft: Draft) -> None:
    """Recomputation and compilation of blocks. As in the Trainer, setting a compiler or mode enables compilation."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if settings[name].value is True:
            draft.put("activation_checkpointing.mode", settings[name].to("full"))
    switch, mode = settings["torch_compile"], settings["torch_compile_mode"]
    if switch.value is True:
        draft.put("compile.enabled", switch)
    for key, given in (
        ("backend", settings["torchdynamo"]),
        ("backend", settings["torch_compile_backend"]),
        ("mode", mode),
    ):
        if not is_off(given.value):
            draft.put(f"compile.{key}", given)
            draft.put("compile.enabled", given.to(True))


def draft_sharding(words: list[str], given: Given, draft: Draft) -> None:
    """Translates options of FairScale and FSDP to a ZeRO stage and offloading."""
    stage = next((_STAGES[word] for word in words if word in _STAGES), None)
    if stage is None:
        near = next((hint for word in words if (hint := suggest(word, list(_STAGES)))), "")
        draft.refuse(given, f"must name one of {', '.join(_STAGES)}", rule="enum", hint=near)
        return
    draft.put("zero_optimization.stage", given.to(stage))
    for word in words:
        if word in ("offload", "cpu_offload"):
            draft.put("zero_optimization.offload_optimizer.device", given.to("cpu"))
            if stage == 3:
                draft.put("zero_optimization.offload_param.device", given.to("cpu"))
        elif word == "auto_wrap":
            draft.note("changed", f"{given.label}: dsjob finds the blocks itself", given)
        elif "hybrid" in word:
            draft.note("changed", f"{given.label}: sharded over all ranks, not within each node", given)
        elif word not in _STAGES:
            hint = suggest(word, [*_STAGES, "offload", "auto_wrap"]) or "unknown option of FSDP"
            draft.note("unknown", f"{given.label}: {word}: {hint}", given)


_FSDP_KEYS = {
    "transformer_layer_cls_to_wrap": "dsjob finds the blocks itself",
    "transformer_cls_names_to_wrap": "dsjob finds the blocks itself",
    "auto_wrap_policy": "dsjob finds the blocks itself",
    "min_num_params": "dsjob finds the blocks itself",
    "backward_prefetch": "FSDP2 always prefetches the next block",
    "backward_prefetch_policy": "FSDP2 always prefetches the next block",
    "forward_prefetch": "FSDP2 always prefetches the next block",
    "limit_all_gathers": "FSDP2 needs no limit",
    "use_orig_params": "FSDP2 always does this",
    "sync_module_states": "rank 0 always sends its values to all ranks",
    "cpu_ram_efficient_loading": "dsjob decides how the model is built",
    "state_dict_type": "checkpoints load on any number of ranks and at any stage",
    "version": "dsjob uses FSDP2",
    "xla": "dsjob does not support TPUs",
    "xla_fsdp_v2": "dsjob does not support TPUs",
    "xla_fsdp_grad_ckpt": "dsjob does not support TPUs",
    "xla_fsdp_settings": "dsjob does not support TPUs",
}


def draft_fsdp_config(config: Settings, draft: Draft) -> None:
    """Translates FSDP's other settings, whose names occur with and without `fsdp_`."""
    for spelt, named in config.items():
        key, value = spelt.removeprefix("fsdp_"), named.value
        if key == "activation_checkpointing":
            draft.put("activation_checkpointing.mode", named.to("full" if draft.switch(named) else "none"))
        elif key == "reshard_after_forward":
            draft.put("zero_optimization.stage", named.to(3 if draft.switch(named) else 2))
        elif key == "offload_params":
            if draft.switch(named):
                draft_sharding(["full_shard", "offload"], named, draft)
        elif key in _FSDP_KEYS:
            if not is_off(value) and value not in (0, [0]) and (key, value) != ("version", 2):
                draft.note("left out", f"{named.label}: {_FSDP_KEYS[key]}", named)
        elif not is_off(value):
            draft.note("unknown", f"{named.label}: {suggest(key, list(_FSDP_KEYS)) or 'unknown key of FSDP'}", named)


def _draft_device(settings: Settings, draft: Draft) -> None:
    for name in ("no_cuda", "use_cpu"):
        if settings[name].value is True:
            draft.put("launch.device", settings[name].to("cpu"))
    backend = settings["ddp_backend"]
    if backend.value in ("nccl", "gloo"):
        draft.put("launch.backend", backend)
    elif not is_off(backend.value):
        draft.note("left out", f"{backend.label}: dsjob's backends are nccl and gloo", backend)


def _draft_resume(settings: Settings, draft: Draft) -> None:
    overwrite, resume = settings["overwrite_output_dir"], settings["resume_from_checkpoint"]
    if resume.value is True:
        draft.put("checkpoint.resume", resume.to("required"))
    elif not is_off(resume.value):
        text = "dsjob does not read Trainer checkpoints; load its weights as the pretrained model"
        draft.note("left out", f"{resume.label}: {text}", resume)
    elif overwrite.value is True:
        draft.put("checkpoint.resume", overwrite.to("never"))
        text = "checkpoint.resume=never starts from scratch, but refuses a folder with checkpoints"
        draft.note("changed", text, overwrite)
    if overwrite.value is True and not is_off(resume.value):
        draft.note("left out", f"{overwrite.label}: {resume.label} takes precedence", overwrite)


def _draft_name(settings: Settings, draft: Draft) -> None:
    run = settings["run_name"]
    if not is_off(run.value) and run.value != settings["output_dir"].value:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(run.value)).strip("-._") or "job"
        draft.put("name", run.to(name))
        if name != run.value:
            draft.note("changed", f"{run.label}: name={name}, because names cannot contain blanks or slashes", run)


def _draft_targets(settings: Settings, draft: Draft) -> None:
    names = settings["label_names"]
    if names.value is not None:
        draft.put("targets", names.to(names.value if isinstance(names.value, list) else [names.value]))


def _draft_guard(settings: Settings, draft: Draft) -> None:
    """`debug=underflow_overflow` reports the first module whose values are not finite; NanGuard does so for the
    gradients of parameters."""
    given = settings["debug"]
    words = given.value if isinstance(given.value, list) else str(given.value or "").replace(",", " ").split()
    for word in map(str, words):
        if word.rpartition(".")[2].lower() == "underflow_overflow":
            draft.put("callbacks.nan_guard._target_", given.to("dsjob.callbacks.NanGuard"))
        else:
            draft.note("left out", f"{given.label}: dsjob --debug shows tracebacks", given)
