"""How a run finds its way back: from its own checkpoints, or from another job's weights, as checkpoint.resume says.

Hyperparameters of a resumed job are the document's where they differ from those in the checkpoint. A warm start
(`resume: <path or URL>`) takes weights alone, and only while the run has no checkpoint of its own, so that a requeued
job resumes its own.
"""

from __future__ import annotations

from dsjob import storage
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.committed import Loaded, Matched
from dsjob.checkpoint.other.elsewhere import is_own
from dsjob.contract.resolved import ResolvedJob
from dsjob.document.resolve import complete_job
from dsjob.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError, UsageError
from dsjob.optim.changes import apply_changes
from dsjob.ranks.agreement import on_rank_0
from dsjob.training.run import Run

_WORDS = ("auto", "never", "required")
_AVERAGED = (
    "since the checkpoint: a step's loss is the mean over its targets, where batches have labels; the version of dsjob"
    " that saved it averaged the means of micro batches, as trainer.loss_average=batches does"
)


def resume(run: Run, job: ResolvedJob) -> Loaded | None:
    """Begins a new attempt, and continues from a checkpoint where there is one; None where training begins anew.

    Raises UsageError where checkpoint.resume names what is not there, before older runs are fenced by it.
    """
    policy, checkpointer = run.spec.checkpoint.resume, run.checkpointer
    tags = checkpointer.tags()
    if policy == "never" and tags:
        raise CheckpointError(
            f"checkpoint.resume is never, but {checkpointer.url} holds checkpoints (the newest is {tags[0]})",
            hint="choose another output.dir or checkpoint.dir, or continue with checkpoint.resume=auto",
        )
    if policy == "required" and not tags:
        raise NoCheckpointError(
            f"checkpoint.resume is required, but {checkpointer.url} holds no committed checkpoint",
            hint="point checkpoint.dir at one, or start anew with checkpoint.resume=auto",
        )
    tag = None if policy in _WORDS or "/" in policy else policy
    own = True
    if tag is not None or ("/" in policy and not tags):
        own = on_rank_0(run.engine.world.everyone, lambda: _is_own(policy if tag is None else checkpointer.url, tag))
    checkpointer.open()
    tags = checkpointer.tags()  # with what an older run has committed before it was fenced
    if tag is None and not tags:
        return _begin_from(run, policy, own=own) if "/" in policy else None
    if "/" in policy:
        run.say("note", f"{checkpointer.url} holds checkpoints of this job: it goes on from those, not from {policy}")
    seed = run.spec.trainer.seed
    loaded = checkpointer.load(run.savable, tag=tag, seed=seed) if tag else _load_newest(run, tags)
    _follow_changes(run, loaded, job)
    if tag is not None and tags and tags[0] != loaded.tag:
        checkpointer.set_aside(newer_than=loaded.step)
    if run.spec.checkpoint.best is not None:
        run.progress.rated = checkpointer.rated()
    run.progress.last_saved = loaded.url
    return loaded


def _is_own(url: str, tag: str | None) -> bool:
    """See `is_own`. What is not there was named by mistake, which a run that trains there has not to be fenced for."""
    try:
        return is_own(url, tag)
    except NoCheckpointError as error:
        if tag is None and not storage.exists(url):
            hint = f"{error.message}: {error.hint}"
            raise UsageError(f"checkpoint.resume: there is no file or folder {url}", hint=hint) from error
        raise UsageError(f"checkpoint.resume: {error.message}", hint=error.hint) from error


def _load_newest(run: Run, tags: list[str]) -> Loaded:
    """Loads the newest checkpoint; with `on_corrupt: previous` the newest that is not damaged."""
    damaged: list[str] = []
    first: CorruptCheckpointError | None = None
    for tag in tags:
        try:
            loaded = run.checkpointer.load(run.savable, tag=tag, seed=run.spec.trainer.seed)
        except CorruptCheckpointError as error:
            if run.spec.checkpoint.on_corrupt == "stop":
                hint = "restore it from a copy, or go on from the one before it with checkpoint.on_corrupt=previous"
                raise CorruptCheckpointError(error.message, hint=hint) from error
            run.say("damaged", f"{error.message}; trying the checkpoint before it")
            damaged.append(tag)
            first = first or error
            continue
        run.checkpointer.set_aside_damaged(damaged)
        return loaded
    assert first is not None
    raise CorruptCheckpointError(f"no checkpoint is whole; of the newest: {first.message}", hint=first.hint) from first


def _follow_changes(run: Run, loaded: Loaded, job: ResolvedJob) -> None:
    """Hyperparameters are the document's where they differ from those the checkpoint was saved with."""
    if loaded.job is not None and "loss_average" not in loaded.job.get("trainer", {}) and run.averaging.by_targets:
        run.say("changed", _AVERAGED)
    known = complete_job(loaded.job).models if loaded.job is not None else {}
    for name, engine in run.engines.items():
        if engine.optimizer is None or name not in known:
            continue
        before, now = known[name].spec, job.models[name].spec
        changed = apply_changes(engine.optimizer, engine.lr_scheduler, before, now)
        types = [spec.scheduler.label if spec.scheduler else "none" for spec in (before, now)]
        if types[0].lower() != types[1].lower():
            changed.append(f"scheduler {types[0]} -> {types[1]}, which goes on at step {run.step}")
        if changed:
            of = f"{name} " if run.spec.models else ""
            run.say("changed", f"{of}since the checkpoint: {', '.join(changed)}")


def _begin_from(run: Run, url: str, *, own: bool) -> Loaded | None:
    """Begins with the weights of another job's checkpoint, or goes on from what another program has left at `url`."""
    world, strict = run.engine.world, run.spec.checkpoint.strict
    if not own:
        return Checkpointer(url, world=world).load(run.savable, strict=strict, seed=run.spec.trainer.seed)
    run.say("warm start", describe_matched(run.checkpointer.load_weights(run.savable, url, strict=strict)))
    return None


def describe_matched(matched: Matched) -> str:
    """What of a warm start was taken and what was not, one line each."""
    lines = [f"{len(matched.taken)} tensors from {matched.url}"]
    for title, names in (
        ("begin anew, not in it", matched.missing),
        ("not in the model", matched.unused),
        ("of another shape", matched.reshaped),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            lines.append(f"  {title}: {', '.join(names[:8])}{more}")
    return "\n".join(lines)
