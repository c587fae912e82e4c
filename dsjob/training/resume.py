"""Resumes a run as `checkpoint.resume` says: from its own checkpoints, or from weights of another job.

If hyperparameters in the document differ from those in the checkpoint, the document wins. A warm start
(`resume: <path or URL>`) loads only weights, and only if the run has no checkpoint of its own, so that a requeued job
resumes from its own checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.committed import Loaded, Matched
from dsjob.checkpoint.other.elsewhere import is_own
from dsjob.checkpoint.root.retention import Best
from dsjob.contract.models import list_models
from dsjob.contract.paths import Path, get_at
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.shown import shorten
from dsjob.document.resolve import view_model
from dsjob.errors import CheckpointError, ContractError, CorruptCheckpointError, NoCheckpointError, UsageError
from dsjob.optim.changes import apply_changes
from dsjob.ranks.agreement import on_rank_0
from dsjob.training.run import Run

_MOST_CHANGES = 8  # to name
_WORDS = ("auto", "never", "required")
_AVERAGED = (
    "since the checkpoint: if batches have labels, a step's loss is now the mean over its targets; the version of dsjob"
    " that saved the checkpoint averaged the means of micro batches, as trainer.loss_average=batches does"
)


def resume(run: Run, job: ResolvedJob) -> Loaded | None:
    """Begins a new attempt, and resumes from a checkpoint if there is one. None if training starts from scratch.

    Raises UsageError if checkpoint.resume names something that does not exist; this happens before older runs are
    fenced; ContractError if the averages that it asks for do not exist.
    """
    _require_averages(run)
    policy, checkpointer = run.spec.checkpoint.resume, run.checkpointer
    tags = checkpointer.tags()
    if policy == "never" and tags:
        raise CheckpointError(
            f"checkpoint.resume is never, but {checkpointer.url} contains checkpoints (the newest is {tags[0]})",
            hint="choose another output.dir or checkpoint.dir, or resume with checkpoint.resume=auto",
        )
    if policy == "required" and not tags:
        raise NoCheckpointError(
            f"checkpoint.resume is required, but {checkpointer.url} contains no committed checkpoint",
            hint="point checkpoint.dir at one, or start from scratch with checkpoint.resume=auto",
        )
    tag = None if policy in _WORDS or "/" in policy else policy
    own = True
    if tag is not None or ("/" in policy and not tags):
        own = on_rank_0(run.engine.world.everyone, lambda: _is_own(policy if tag is None else checkpointer.url, tag))
    # From here on, older runs of this job can no longer commit.
    checkpointer.open()
    tags = checkpointer.tags()  # list again: an older run may have committed more before it was fenced
    if tag is None and not tags:
        return _begin_from(run, policy, own=own) if "/" in policy else None
    if "/" in policy:
        run.say("note", f"resuming from this job's own checkpoints in {checkpointer.url}, not from {policy}")
    seed = run.spec.trainer.seed
    loaded = checkpointer.load(run.savable, tag=tag, seed=seed) if tag else _load_newest(run, tags)
    _follow_changes(run, loaded, job)
    if others := checkpointer.list_others():
        what = f"{len(others)} checkpoint{'s' * (len(others) > 1)} of another run, such as {others[-1]}"
        run.say("note", f"{checkpointer.url} has {what}: this run deletes only its own")
    # A run that went back must not resume from the newer checkpoints later.
    if tag is not None and tags and tags[0] != loaded.tag:
        checkpointer.set_aside(newer_than=loaded.step)
    if run.spec.checkpoint.best is not None:
        run.progress.rated = checkpointer.rated()
    run.progress.last_saved = loaded.url
    return loaded


def _is_own(url: str, tag: str | None) -> bool:
    """See `is_own`. Raises NoCheckpointError if nothing is there: a mistyped path or tag must not fence a running
    job."""
    try:
        return is_own(url, tag)
    except NoCheckpointError as error:
        raise NoCheckpointError(f"checkpoint.resume: {error.message}", hint=error.hint) from error


def _load_newest(run: Run, tags: list[str]) -> Loaded:
    """Loads the newest checkpoint, or with `on_corrupt: previous`, the newest undamaged one."""
    damaged: list[str] = []
    first: CorruptCheckpointError | None = None
    # Newest first.
    for tag in tags:
        try:
            loaded = run.checkpointer.load(run.savable, tag=tag, seed=run.spec.trainer.seed)
        except CorruptCheckpointError as error:
            if run.spec.checkpoint.on_corrupt == "stop":
                previous = "resume from the previous one with checkpoint.on_corrupt=previous"
                hint = f"restore it from a copy, or {previous if tags[1:] else 'start over in another output.dir'}"
                raise CorruptCheckpointError(error.message, hint=hint) from error
            run.say("damaged", f"{error.message}; trying the previous checkpoint")
            damaged.append(tag)
            first = first or error
            continue
        run.checkpointer.set_aside_damaged(damaged)
        return loaded
    assert first is not None
    raise CorruptCheckpointError(
        f"all checkpoints are damaged; the newest: {first.message}", hint=first.hint
    ) from first


def _follow_changes(run: Run, loaded: Loaded, job: ResolvedJob) -> None:
    """Applies hyperparameters that have changed in the document since the checkpoint, and tells the user."""
    if loaded.job is None:
        return
    if "loss_average" not in loaded.job.get("trainer", {}) and run.averaging.by_targets:
        run.say("changed", _AVERAGED)
    if changed := _list_changes(loaded.job, job.document):
        run.say("changed", f"since the checkpoint: {', '.join(changed)}")
    known = list_models(loaded.job)
    for name, engine in run.engines.items():
        if engine.optimizer is None or name not in known:
            continue
        before, now = view_model(loaded.job, name), job.models[name].spec
        changed = apply_changes(engine.optimizer, engine.lr_scheduler, before, now)
        types = [spec.scheduler.label if spec.scheduler else "none" for spec in (before, now)]
        if types[0].lower() != types[1].lower():
            changed.append(f"scheduler {types[0]} -> {types[1]}, which continues at step {run.step}")
        if changed:
            of = f"{name} " if run.spec.models else ""
            run.say("changed", f"{of}since the checkpoint: {', '.join(changed)}")


def _list_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How model, data and loss differ between two resolved documents. Optimizers and schedules: see `apply_changes`."""
    places: list[Path] = [
        ("model",),
        *(("models", name, "model") for name in now.get("models", {})),
        ("data",),
        ("loss",),
    ]
    found = [text for place in places for text in _compare(get_at(before, place), get_at(now, place), place)]
    more = len(found) - _MOST_CHANGES
    return [*found[:_MOST_CHANGES], f"and {more} more"] if more > 0 else found


def _compare(before: Any, now: Any, path: Path) -> list[str]:
    if before == now:
        return []
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [f"{'.'.join(map(str, path))} {shorten(before, as_json=True)} -> {shorten(now, as_json=True)}"]
    # Outside targets, a key that only one of them has is a default of the version of dsjob that resolved it.
    keys = {**before, **now} if "_target_" in now else [key for key in now if key in before]
    return [text for key in keys for text in _compare(before.get(key), now.get(key), (*path, key))]


def load_best(run: Run) -> None:
    """Loads the weights of the best checkpoint, if `checkpoint.load_best_at_end` asks for it. A collective.

    Call it after the last save has settled. Raises CorruptCheckpointError, CheckpointError, StorageError.
    """
    section = run.spec.checkpoint
    if not section.load_best_at_end or section.best is None:
        return
    chosen = find_best(run)
    if chosen is None:
        run.say("note", f"no checkpoint has {section.best.metric}: the weights stay those of step {run.step}")
        return
    tag, value = chosen["tag"], chosen["metrics"][section.best.metric]
    run.checkpointer.load_weights(run.savable, storage.join(run.checkpointer.url, tag), ema=section.ema)
    what = "averages" if section.ema else "weights"
    run.say("best", f"{tag}, {section.best.metric} {value:.4f}: its {what} are loaded")


def find_best(run: Run) -> Mapping[str, Any] | None:
    """Step, tag, folder and metrics of the checkpoint that `load_best_at_end` loads. None without it, or if no
    checkpoint has the metric. A collective."""
    section = run.spec.checkpoint
    best = Best.of(section.best, keep=1) if section.load_best_at_end else None
    return next(iter(best.choose(run.checkpointer.rated())), None) if best is not None else None


def _require_averages(run: Run) -> None:
    """The averages of the best checkpoint can only be loaded at the end if a callback keeps some."""
    section = run.spec.checkpoint
    if section.ema and section.load_best_at_end and not any(one.strategy.averages for one in run.engines.values()):
        error = ContractError(
            "checkpoint.ema is set, but no callback keeps averages of weights",
            hint="add callbacks: {ema: {_target_: dsjob.callbacks.EMA}}, or leave checkpoint.ema out",
        )
        error.put_at(("checkpoint", "ema"))
        raise error


def _begin_from(run: Run, url: str, *, own: bool) -> Loaded | None:
    """Starts from the weights of another job's checkpoint, or resumes from a checkpoint of another program at `url`."""
    world, strict, ema = run.engine.world, run.spec.checkpoint.strict, run.spec.checkpoint.ema
    if not own:
        require_no_averages(url, ema=ema)
        return Checkpointer(url, world=world).load(run.savable, strict=strict, seed=run.spec.trainer.seed)
    matched = run.checkpointer.load_weights(run.savable, url, strict=strict, ema=ema)
    run.say("warm start", describe_matched(matched, ema=ema))
    return None


def require_no_averages(url: str, *, ema: bool) -> None:
    """Raises UsageError if averages are wanted from the checkpoint of another program."""
    if ema:
        raise UsageError(
            f"{url} is not a checkpoint of dsjob's, so it has no averages", hint="leave out checkpoint.ema"
        )


def describe_matched(matched: Matched, *, ema: bool = False) -> str:
    """What a warm start loaded and what it did not, one line each."""
    lines = [f"{len(matched.taken)} tensors from {matched.url}{describe_averages(matched, ema=ema)}"]
    for title, names in (
        ("initialised, not in the checkpoint", matched.missing),
        ("not in the model", matched.unused),
        ("different shapes", matched.reshaped),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            lines.append(f"  {title}: {', '.join(names[:8])}{more}")
    return "\n".join(lines)


def describe_averages(matched: Matched, *, ema: bool) -> str:
    """Which of weights and averages were loaded, if a checkpoint has both."""
    if not matched.averages:
        return ""
    return "; the averages of its weights" if ema else "; its weights, not their averages"
