"""Rules of the course of a job: its end, evaluations, saves, and where things go."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any

from dsjob.contract.paths import Path
from dsjob.contract.rules.table import Document, Finding, enter, read
from dsjob.contract.schema import job_schema
from dsjob.contract.secrets import describe_secret, find_secrets, is_argument, is_reference, list_texts, redact
from dsjob.errors import Problem


@enter("finite")
def _finite(document: Document) -> Iterator[Finding]:
    """The resolved document is JSON, which has no inf and no nan; overrides and interpolations can bring them in."""
    places: list[tuple[Path, Any]] = [((), document)]
    while places:
        path, value = places.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield path, f"must be a finite number, not {value}", "leave it out, or null"
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        places += [((*path, key), item) for key, item in items]


@enter("no-end", whole=True)
def _end(document: Document) -> Iterator[Finding]:
    """A job that names neither steps nor epochs would never end."""
    trainer = read(document, "trainer", {})
    if "max_steps" not in trainer and "max_epochs" not in trainer:
        yield "trainer", "needs max_steps or max_epochs", "trainer.max_steps=1000, for example"


@enter("no-optimizer", whole=True)
def _optimizer(document: Document) -> Iterator[Finding]:
    """Training without an optimizer changes nothing."""
    if "optimizer" not in document and not document.get("models"):  # each of several is looked at by itself
        yield "optimizer", "is missing: nothing would be trained", "optimizer: {type: AdamW, params: {lr: 1e-3}}"


@enter("model-or-models", whole=True)
def _models(document: Document) -> Iterator[Finding]:
    """One model is trained by the loop; how several train together is for a function of the user's to say."""
    evaluates = "eval" in read(document, "data", {}) and not read(document, "trainer.eval_step")
    if read(document, "trainer.step") and "loss" in document and not evaluates:
        yield "loss", "is not used beside trainer.step", "compute it there"
    if not document.get("models"):
        return
    if "model" in document:
        yield "models", "and model exclude one another", "move it below models"
    first, entry = next(iter(document["models"].items()))
    if isinstance(entry, dict) and entry.get("trainable") is False:
        yield (
            f"models.{first}.trainable",
            "the first model counts the steps: it has to be trained",
            "name another first",
        )
    if not read(document, "trainer.step"):
        yield "models", "need trainer.step", "trainer: {step: {_target_: my_module.step}}, called with (engines, batch)"


@enter("no-mpu", whole=True)
def _mpu(document: Document) -> Iterator[Finding]:
    """Nothing says which ranks hold one model together, and what each of them holds is for the model to say."""
    if read(document, "trainer.model_parallel_size", 1) != 1 and not read(document, "trainer.mpu"):
        yield (
            "trainer.model_parallel_size",
            "is given without trainer.mpu",
            "trainer: {mpu: {_target_: my_module.make_mpu}}",
        )


@enter("no-eval-data", whole=True)
def _eval_data(document: Document) -> Iterator[Finding]:
    """A cadence of evaluation, or metrics, without a set to evaluate on are a mistake in one place or the other."""
    if "eval" in read(document, "data", {"eval": True}):
        return
    advice = "give data.eval, or leave it out"
    for key in ("eval_every", "eval_batches", "eval_at_start"):
        if read(document, f"trainer.{key}"):
            yield f"trainer.{key}", "is set, but there is no data.eval", advice
    if read(document, "trainer.eval_step"):
        yield "trainer.eval_step", "is given, but there is no data.eval", advice
    if any("eval" in phases for phases in _list_phases(document).values()):
        yield "metrics", "are given, but there is no data.eval", advice
    if read(document, "checkpoint.best") is not None:
        yield "checkpoint.best", "is set, but there is no data.eval to find the best by", advice


@enter("unknown-metric", whole=True)
def _metric(document: Document) -> Iterator[Finding]:
    """A callback that waits for a metric which nobody computes waits for ever."""
    if read(document, "trainer.eval_step"):
        return  # what it returns is for it to say
    evaluated = "eval" in read(document, "data", {"eval": True})
    names = [name for name, phases in _list_phases(document).items() if "eval" in phases]
    known = {"eval/loss", *(f"eval/{name}" for name in names)} if evaluated else set()
    there = f"there is {', '.join(sorted(known))}" if known else "give data.eval"
    for name, callback in read(document, "callbacks", {}).items():
        monitored = callback.get("monitor") if isinstance(callback, dict) else None
        if isinstance(monitored, str) and monitored.startswith("eval/") and _leads_nowhere(monitored, known):
            yield f"callbacks.{name}.monitor", f'nobody computes "{monitored}"', there
    chosen = read(document, "checkpoint.best.metric")
    if evaluated and isinstance(chosen, str) and _leads_nowhere(chosen, known):
        yield "checkpoint.best.metric", f'nobody computes "{chosen}"', there


def _list_phases(document: Document) -> dict[str, list[str]]:
    """Where each metric is computed."""
    metrics = read(document, "metrics", {})
    return {
        name: (metric.get("phases") if isinstance(metric, dict) else None) or ["eval"]
        for name, metric in metrics.items()
    }


def _leads_nowhere(metric: str, known: set[str]) -> bool:
    """Whether a metric is none of the known ones, nor a key of what one of these gives."""
    return metric not in known and metric.rpartition("/")[0] not in known - {"eval/loss"}


@enter("cadence-beyond-end", severity="warning", whole=True)
def _cadence(document: Document) -> Iterator[Finding]:
    """What happens every n steps of a shorter run does not happen at all, but for what is done at the end."""
    steps = read(document, "trainer.max_steps")
    for place, what in (("trainer.eval_every", "evaluations"), ("checkpoint.every", "saves")):
        every = read(document, place)
        if isinstance(steps, int) and isinstance(every, int) and every > steps:
            yield place, f"{every} is beyond the last step, {steps}: no {what} on the way", "lower it"


@enter("resume-word", severity="warning", whole=True)
def _resume(document: Document) -> Iterator[Finding]:
    """Any other word is the tag of a checkpoint, and a run that cannot find it ends before it begins."""
    policy, words = read(document, "checkpoint.resume"), ("auto", "never", "required")
    if not isinstance(policy, str) or policy in words:
        return
    meant = {"no": "never", "false": "never", "yes": "auto", "true": "auto"}.get(policy.lower())
    near = difflib.get_close_matches(policy.lower(), words, n=1)
    if meant or near:
        hint = f'did you mean "{meant or near[0]}"?'
        yield "checkpoint.resume", f'"{policy}" is taken for the tag of a checkpoint', hint


@enter("nothing-saved", severity="warning", whole=True)
def _saved(document: Document) -> Iterator[Finding]:
    """A run that saves neither on the way nor at its end leaves nothing behind."""
    if read(document, "checkpoint.at_end", True) is not False:
        return
    if any(read(document, f"checkpoint.{key}") is not None for key in ("every_minutes", "every_epochs", "best")):
        return
    every, steps = read(document, "checkpoint.every", 0), read(document, "trainer.max_steps")
    if not every or (isinstance(steps, int) and every > steps):
        yield (
            "checkpoint.at_end",
            "is off, and nothing is saved on the way: no checkpoint at all",
            "set checkpoint.every",
        )


@enter("memory-between-ranks", whole=True)
def _memory(document: Document) -> Iterator[Finding]:
    """`memory://` lies in the memory of one process: ranks do not see what the others have saved there."""
    directory, nproc = read(document, "checkpoint.dir", ""), read(document, "launch.nproc", 1)
    if isinstance(directory, str) and directory.startswith("memory:") and nproc != 1:
        yield "checkpoint.dir", f"{directory} cannot be shared by {nproc} ranks", "use a folder, or an object store"


@enter("secret-in-url")
def _secret(document: Document) -> Iterator[Finding]:
    """A document is copied into each checkpoint and each run folder; credentials are for the store's own tools."""
    for place in ("checkpoint.dir", "checkpoint.resume"):
        url = read(document, place, "")
        if isinstance(url, str) and (secret := describe_secret(url)):
            yield place, f"{redact(url)} is refused: {secret}", "use the environment or a profile of the store's tools"
    for path, text in list_texts(document):
        if is_argument(document, path) and isinstance(text, str) and (secret := describe_secret(text)):
            yield path, f"{redact(text)} is refused: {secret}", "${oc.env:NAME}, with all of it in the environment"


@enter("secret-in-document", whole=True)
def _named_secret(document: Document) -> Iterator[Finding]:
    """A document is copied into each checkpoint and each run folder, and shown to whoever asks; a reference to the
    environment stays one in all of these."""
    for path, value in find_secrets(document):
        if not is_reference(value) and not _is_idle(document, path):
            override = f"{Problem('', path, 'secret-in-document').dotted}='${{oc.env:NAME}}'"
            yield path, "is refused: a secret may not stand in a document", f"{override}, with it in the environment"


@enter("secret-without-effect", severity="warning", whole=True)
def _idle_secret(document: Document) -> Iterator[Finding]:
    """A DeepSpeed config may hold keys of services that nothing here calls: they are left out of all that is saved,
    but the file itself still holds them."""
    for path, value in find_secrets(document):
        if path[0] == "deepspeed" and not is_reference(value) and _is_idle(document, path[1:]):
            yield path, "is a secret in a file, and has no effect here", "leave it out"


def _is_idle(document: Document, path: Path) -> bool:
    """Whether what is at `path` is of a DeepSpeed config's sections that a job does not have."""
    config, parts = document.get("deepspeed"), path[1:] if path[0] == "deepspeed" else path
    return isinstance(config, dict) and parts[0] in config and parts[0] not in job_schema()["properties"]


@enter("output-not-local", whole=True)
def _local_output(document: Document) -> Iterator[Finding]:
    """Logs and metrics are appended to, which object stores do not know; checkpoints may be anywhere."""
    directory = read(document, "output.dir", "")
    if isinstance(directory, str) and "://" in directory:
        shown = redact(directory)
        yield "output.dir", f"must be a local folder, not {shown}", f"checkpoint.dir: {shown} for checkpoints"
