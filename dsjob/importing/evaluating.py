"""The Trainer's arguments on what a job does besides training: how often it logs, evaluates and saves, which checkpoint
is the best, and the tasks after training."""

from __future__ import annotations

import math
import re

from dsjob.importing.given import MODULE, Draft, Given, Rank, Settings, is_off


def draft_evaluating(settings: Settings, total: int | None, draft: Draft) -> None:
    """Adds cadences, the best checkpoint and tasks to the draft. `total`: optimizer steps, if known."""
    log, every = settings["logging_steps"], settings["eval_steps"]
    _draft_every("trainer.log_every", settings["logging_strategy"], log, total, draft)
    strategy = _name_evaluation(settings, draft)
    if not is_off(strategy.value):
        _draft_every("trainer.eval_every", strategy, log if is_off(every.value) else every, total, draft)
    elif every.rank > Rank.DEFAULT:
        draft.note("left out", f"{every.label}: {strategy.label} disables evaluation", every)
    if settings["eval_on_start"].value is True:
        draft.put("trainer.eval_at_start", settings["eval_on_start"])
    best = _draft_best(settings, draft)
    asked = (strategy, settings["do_eval"], settings["eval_on_start"], *best)
    given = next((given for given in asked if not is_off(given.value)), None)
    if given is not None:
        draft.put("data.eval._target_", given.as_default(f"{MODULE}.build_eval_data"))
    _draft_every("checkpoint.every", settings["save_strategy"], settings["save_steps"], total, draft)
    limit = settings["save_total_limit"]
    draft.put("checkpoint.keep", limit.to(limit.value or 0))
    _draft_eval_batch(settings, draft)
    _draft_generation(settings, draft)
    _draft_tasks(settings, strategy, draft)


def _name_evaluation(settings: Settings, draft: Draft) -> Given:
    """The evaluation strategy: from the argument of that name, or from the old switch."""
    named, old = settings["eval_strategy"], settings["evaluate_during_training"]
    if old.value is not True:
        return named
    if named.rank > Rank.DEFAULT and named.value != "steps":
        draft.note("conflict", f"trainer.eval_every: {named} overrides {old}")
        return named
    return old.to("steps")


def _draft_every(path: str, strategy: Given, steps: Given, total: int | None, draft: Draft) -> None:
    kind = _name_kind(strategy)
    if kind == "steps":
        _draft_steps(path, steps, total, draft)
        return
    if kind == "epoch":
        draft.put(path, strategy.to("1ep"))
    elif kind not in ("no", "best"):
        draft.refuse(strategy, "must be one of no, steps, epoch", rule="enum")
    elif path == "checkpoint.every" and strategy.rank > Rank.DEFAULT:
        draft.put(path, strategy.to(0))
    elif strategy.rank > Rank.DEFAULT:
        draft.note("left out", f"{strategy.label}: {path} must be at least 1", strategy)
    if steps.rank > Rank.DEFAULT and not (path == "trainer.eval_every" and steps.name.endswith("logging_steps")):
        draft.note("left out", f"{steps.label}: {strategy.label} takes precedence", steps)


def _name_kind(strategy: Given) -> str:
    return "no" if is_off(strategy.value) else str(strategy.value).rpartition(".")[2].lower()


def _draft_steps(path: str, steps: Given, total: int | None, draft: Draft) -> None:
    count = draft.number(steps, 1)
    if count <= 0:
        draft.refuse(steps, "must be greater than 0", rule="range")
    elif count >= 1:
        draft.put(path, steps.to(draft.whole(steps, 1)))
    elif total is None:
        draft.note("fill in", f"{path}: {steps.label} is a share of all steps, whose number is unknown", steps)
    else:
        draft.put(path, steps.to(max(1, math.ceil(count * total))))


def _draft_best(settings: Settings, draft: Draft) -> list[Given]:
    """Adds the best checkpoint to the draft. Returns the arguments that ask for it."""
    loads, metric, greater = (
        settings[name] for name in ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    )
    saves = settings["save_strategy"] if _name_kind(settings["save_strategy"]) == "best" else None
    named = None if is_off(metric.value) else metric
    wanted = [given for given in (loads, named, saves) if given is not None and not is_off(given.value)]
    if not wanted:
        if not is_off(greater.value):
            draft.note("left out", f"{greater.label}: only used with metric_for_best_model", greater)
        return []
    if loads.value is True:
        draft.put("checkpoint.load_best_at_end", loads)
    name = str(named.value).removeprefix("eval_") if named is not None else "loss"
    draft.put("checkpoint.best.metric", (named or wanted[0]).to(f"eval/{name}"))
    rises = not name.endswith("loss") if greater.value is None else draft.switch(greater)
    draft.put("checkpoint.best.mode", (wanted[0] if greater.value is None else greater).to("max" if rises else "min"))
    if named is not None and re.fullmatch(r"\w+", name) and name != "loss":
        draft.put(f"metrics.{name}._target_", named.as_default(f"{MODULE}.{name}"))
        text = f"metrics.{name}: replace {MODULE}.{name} with your metric; compute_metrics was in your program"
        draft.note("fill in", text, named)
    return wanted


def _draft_eval_batch(settings: Settings, draft: Draft) -> None:
    for name in ("per_gpu_eval_batch_size", "per_device_eval_batch_size"):
        if settings[name].rank > Rank.DEFAULT and settings[name].value is not None:
            draft.put("trainer.eval_micro_batch", settings[name])


def _draft_generation(settings: Settings, draft: Draft) -> None:
    """predict_with_generate, and the lengths and beams that Seq2SeqTrainer only uses with it."""
    switch = settings["predict_with_generate"]
    parts = {"generation_max_length": "max_length", "generation_num_beams": "num_beams"}
    for name, key in parts.items():
        if settings[name].value is None:
            continue
        if switch.value is True:
            draft.put(f"generation.{key}", settings[name].to(draft.whole(settings[name])))
        else:
            draft.note("left out", f"{settings[name].label}: only used with predict_with_generate", settings[name])
    if switch.value is True:
        draft.put("generation.use_cache", switch.to(True))
        text = "generation.tokenizer: name your tokenizer's folder, so that metrics compare texts"
        draft.note("fill in", text, switch)


def _draft_tasks(settings: Settings, strategy: Given, draft: Draft) -> None:
    """What the job does besides training. A program of the examples does not train without do_train; others ignore the
    argument, and the Trainer sets do_eval by itself if there is an eval_strategy."""
    evaluates, predicts = settings["do_eval"], settings["do_predict"]
    if predicts.value is True:
        draft.put("data.test._target_", predicts.as_default(f"{MODULE}.build_test_data"))
        text = f"data.test: replace {MODULE}.build_test_data with your test set; dsjob predict writes its predictions"
        draft.note("fill in", text, predicts)
    only = [given for given in (evaluates, predicts) if given.value is True and given.rank == Rank.COMMAND_LINE]
    if settings["do_train"].value is True or not only or not is_off(strategy.value):
        if predicts.value is True:
            draft.put("tasks", predicts.to(["train", "predict"]))
        return
    tasks = ["eval"] * (evaluates.value is True) + ["predict"] * (predicts.value is True)
    draft.put("tasks", only[0].to(tasks))
    draft.note("changed", f"{only[0].label}: without --do_train, the job does not train: tasks={tasks}", only[0])
