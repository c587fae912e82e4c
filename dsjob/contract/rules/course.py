"""Rules about how a job runs: when it ends, evaluates and saves, and where its files go."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any

from dsjob.contract.lengths import count_steps_of
from dsjob.contract.paths import Path
from dsjob.contract.rules.metrics import list_phases, trains
from dsjob.contract.rules.table import Document, Finding, enter, read
from dsjob.contract.secrets import describe_secret, find_secrets, is_argument, is_reference, list_texts, redact
from dsjob.errors import Problem

_OURS = "dsjob.callbacks."
_POLICIES = ("auto", "never", "required")


@enter("finite")
def _finite(document: Document) -> Iterator[Finding]:
    """The resolved document is JSON, which has no inf or nan. Overrides and interpolations can introduce them."""
    places: list[tuple[Path, Any]] = [((), document)]
    while places:
        path, value = places.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield path, f"must be a finite number, but is {value}", "leave it out, or write null"
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        places += [((*path, key), item) for key, item in items]


@enter("no-end", whole=True)
def _end(document: Document) -> Iterator[Finding]:
    """A job that sets neither a number of steps nor of epochs, nor another length, would never end."""
    trainer = read(document, "trainer", {})
    if not trains(document):
        return
    if not {"max_steps", "max_epochs", "max_length"} & trainer.keys():
        yield (
            "trainer",
            "sets neither max_steps nor max_epochs, so the job would never end",
            "for example max_steps: 1000",
        )


@enter("no-train-data", whole=True)
def _train_data(document: Document) -> Iterator[Finding]:
    """Training needs data; the tasks eval and predict have data of their own."""
    if trains(document) and isinstance(document.get("data"), dict) and "train" not in document["data"]:
        yield "data", "the required key train is missing", "only jobs with other tasks than train can do without it"


@enter("own-loader", whole=True)
def _own_loader(document: Document) -> Iterator[Finding]:
    """A loader of the user's own decides which samples are in a batch."""
    for key in ("group_by_length", "shuffle_buffer"):
        if read(document, "data.loader") and read(document, f"data.{key}"):
            yield f"data.{key}", "has no effect with data.loader", "leave it out, and do this in the loader"


@enter("no-optimizer", whole=True)
def _optimizer(document: Document) -> Iterator[Finding]:
    """Training without an optimizer changes nothing."""
    several = document.get("models")  # each of them is checked on its own
    if trains(document) and "optimizer" not in document and not several:
        hint = "add one, for example optimizer: {type: AdamW, params: {lr: 1e-3}}"
        yield "optimizer", "is missing: nothing would be trained", hint


@enter("model-or-models", whole=True)
def _models(document: Document) -> Iterator[Finding]:
    """The loop can train one model. How several models train together is defined by a function of the user."""
    evaluates = "eval" in read(document, "data", {}) and not read(document, "trainer.eval_step")
    for key in ("inputs", "targets", "outputs", "loss", "losses", "label_smoothing"):
        if read(document, "trainer.step") and document.get(key) and not evaluates:
            yield key, "is not used with trainer.step", "call the model and compute the loss in trainer.step"
    if not document.get("models"):
        return
    if "model" in document:
        yield "models", "cannot be combined with model", "move the model below models"
    first, entry = next(iter(document["models"].items()))
    if isinstance(entry, dict) and entry.get("trainable") is False:
        yield (
            f"models.{first}.trainable",
            "the first model counts the steps, so it must be trained",
            "list another model first",
        )
    if not read(document, "trainer.step"):
        hint = "add trainer: {step: {_target_: my_module.step}}, a function of (engines, batch)"
        yield "models", "need trainer.step", hint


@enter("no-step-to-call", whole=True)
def _accumulation(document: Document) -> Iterator[Finding]:
    """Without trainer.step, dsjob itself takes the micro batches of a step. A metric of training needs single
    batches."""
    place = "trainer.disable_auto_grad_accumulation"
    if read(document, place) is not True:
        return
    if not read(document, "trainer.step"):
        yield place, "is set without trainer.step", "add trainer: {step: {_target_: my_module.step}}"
    if any("train" in phases for phases in list_phases(document).values()):
        yield place, "cannot be combined with metrics of the phase train", "compute them in trainer.step"


@enter("one-loss", whole=True)
def _losses(document: Document) -> Iterator[Finding]:
    """`loss`, `losses` and `label_smoothing` each define the whole loss."""
    given = [key for key in ("loss", "losses", "label_smoothing") if document.get(key)]
    for key in given[1:]:
        own = "a loss of torch.nn has an argument label_smoothing of its own" if key == "label_smoothing" else ""
        yield key, f"cannot be combined with {given[0]}", own or "move loss below losses, under a name"
    if document.get("label_smoothing") and len(read(document, "targets", ["labels"])) != 1:
        yield "targets", "label_smoothing needs exactly one target", "for example targets: [labels]"


@enter("no-mpu", whole=True)
def _mpu(document: Document) -> Iterator[Finding]:
    """Only an mpu defines which ranks hold one model together; the model itself decides which part each of them
    holds."""
    if read(document, "trainer.model_parallel_size", 1) != 1 and not read(document, "trainer.mpu"):
        yield (
            "trainer.model_parallel_size",
            "is set without trainer.mpu",
            "add trainer: {mpu: {_target_: my_module.make_mpu}}",
        )


@enter("no-eval-data", whole=True)
def _eval_data(document: Document) -> Iterator[Finding]:
    """Settings of the evaluation, or metrics, have no use without an evaluation set: one of the two is a mistake."""
    if "eval" in read(document, "data", {"eval": True}):
        return
    advice = "add data.eval, or leave this out"
    for key in ("eval_every", "eval_batches", "eval_at_start"):
        if trains(document) and read(document, f"trainer.{key}"):
            yield f"trainer.{key}", "is set, but there is no data.eval", advice
    tests = "test" in read(document, "data", {}) and read(document, "tasks", ["train"]) != ["train"]
    if read(document, "trainer.eval_step") and not tests:
        yield "trainer.eval_step", "is set, but there is no data.eval", advice
    if not tests and any("eval" in phases for phases in list_phases(document).values()):
        yield "metrics", "are set, but there is no data.eval", advice
    if trains(document) and read(document, "checkpoint.best") is not None:
        yield "checkpoint.best", "is set, but there is no data.eval to determine the best", advice


@enter("no-task-data", whole=True)
def _task_data(document: Document) -> Iterator[Finding]:
    """Evaluating and predicting need data of their own. Results on the training set would say little."""
    if not {"eval", "test"} & read(document, "data", {"eval": True}).keys():
        for task in read(document, "tasks", []):
            if task != "train":
                yield "tasks", f"{task} needs data.eval or data.test", "add one of them"


@enter("generation-eval-step")
def _generation(document: Document) -> Iterator[Finding]:
    """trainer.eval_step decides alone what a batch gives, so generation beside it would not happen."""
    if read(document, "generation") is not None and read(document, "trainer.eval_step"):
        yield (
            "generation",
            "is set, but trainer.eval_step replaces it",
            "call model.generate in trainer.eval_step",
        )


@enter("cadence-beyond-end", severity="warning", whole=True)
def _cadence(document: Document) -> Iterator[Finding]:
    """Something that is due every n steps never happens in a run of fewer steps, except at its end."""
    steps = read(document, "trainer.max_steps")
    for place, what in (("trainer.eval_every", "evaluations"), ("checkpoint.every", "saves")):
        every = count_steps_of(read(document, place))
        if isinstance(steps, int) and every is not None and every > steps:
            yield place, f"{every:g} is more than the {steps} steps of the run: no {what} before the end", "lower it"


@enter("resume-in-new-folder", whole=True)
def _resume_tag(document: Document) -> Iterator[Finding]:
    """A word that is not a policy is the tag of a checkpoint in the run's own folder. A folder whose name has %time is
    new, so it has no checkpoint."""
    if _is_tag(document) and _is_new_folder(document):
        policy = read(document, "checkpoint.resume")
        hint = _suggest_policy(policy) or "write auto, never, required, or a path (with a /) to a checkpoint"
        yield "checkpoint.resume", f'"{policy}" is the tag of a checkpoint, but each run has a new folder (%time)', hint


def _is_tag(document: Document) -> bool:
    policy = read(document, "checkpoint.resume")
    return isinstance(policy, str) and policy not in _POLICIES and "/" not in policy


def _is_new_folder(document: Document) -> bool:
    folder = read(document, "output.dir", "%time")
    return not read(document, "checkpoint.dir") and isinstance(folder, str) and "%time" in folder


def _suggest_policy(policy: str) -> str:
    meant = {"no": "never", "false": "never", "yes": "auto", "true": "auto"}.get(policy.lower())
    near = difflib.get_close_matches(policy.lower(), _POLICIES, n=1)
    return f'did you mean "{meant or near[0]}"?' if meant or near else ""


@enter("resume-word", severity="warning", whole=True)
def _resume(document: Document) -> Iterator[Finding]:
    """Any other word is taken for the tag of a checkpoint. If there is no such checkpoint, the run fails at the
    start."""
    policy = read(document, "checkpoint.resume")
    if _is_tag(document) and not _is_new_folder(document) and (hint := _suggest_policy(policy)):
        yield "checkpoint.resume", f'"{policy}" is read as the tag of a checkpoint', hint


@enter("monitor-off", severity="warning", whole=True)
def _monitors(document: Document) -> Iterator[Finding]:
    """As in DeepSpeed, a monitor writes nothing unless it is enabled."""
    for name, section in read(document, "monitor", {}).items():
        if name != "custom" and isinstance(section, dict) and section and "enabled" not in section:
            yield (
                f"monitor.{name}",
                "is set, but not enabled, so it writes nothing",
                f"add monitor.{name}.enabled: true",
            )


@enter("nothing-saved", severity="warning", whole=True)
def _saved(document: Document) -> Iterator[Finding]:
    """A run that never saves leaves no checkpoint behind."""
    if read(document, "checkpoint.at_end", True) is not False:
        return
    if any(read(document, f"checkpoint.{key}") is not None for key in ("every_minutes", "every_epochs", "best")):
        return
    every, steps = read(document, "checkpoint.every", 0), read(document, "trainer.max_steps")
    if not every or (isinstance(steps, int) and (count_steps_of(every) or 0) > steps):
        yield (
            "checkpoint.at_end",
            "is false, and no other saves are set: the run would leave no checkpoint",
            "set checkpoint.every",
        )


@enter("no-averages", whole=True)
def _averages(document: Document) -> Iterator[Finding]:
    """Only the callback EMA keeps averages of weights. Without it, loading them fails when training is done."""
    if read(document, "checkpoint.ema") is not True or not read(document, "checkpoint.load_best_at_end"):
        return
    callbacks = read(document, "callbacks", {}).values()
    targets = [str(callback.get("_target_")) for callback in callbacks if isinstance(callback, dict)]
    # A callback of the user's may be a subclass of EMA. The run itself checks that before its first step.
    if trains(document) and all(target.startswith(_OURS) and not target.endswith(".EMA") for target in targets):
        hint = "add callbacks: {ema: {_target_: dsjob.callbacks.EMA}}, or leave checkpoint.ema out"
        yield "checkpoint.ema", "is set, but no callback keeps averages of weights", hint


@enter("unused-averages", severity="warning", whole=True)
def _unused_averages(document: Document) -> Iterator[Finding]:
    """A job that trains loads only the best checkpoint, or that of another job, and may use their averages."""
    loads = read(document, "checkpoint.load_best_at_end") or "/" in str(read(document, "checkpoint.resume"))
    if read(document, "checkpoint.ema") is True and trains(document) and not loads:
        hint = "set checkpoint.load_best_at_end, or give --ema to dsjob eval, predict, generate and convert"
        yield "checkpoint.ema", "has no effect, since this job loads no other weights", hint


@enter("memory-between-ranks", whole=True)
def _memory(document: Document) -> Iterator[Finding]:
    """`memory://` is the memory of one process: ranks do not see what other ranks have saved there."""
    for place in ("checkpoint.dir", "predict.dir"):
        directory, nproc = read(document, place, ""), read(document, "launch.nproc", 1)
        if isinstance(directory, str) and directory.startswith("memory:") and nproc != 1:
            yield place, f"{directory} cannot be shared by {nproc} ranks", "use a folder, or an object store"


@enter("secret-in-url")
def _secret(document: Document) -> Iterator[Finding]:
    """A document is copied into each checkpoint and each run folder. Credentials belong in the store's own tools."""
    for place in ("checkpoint.dir", "checkpoint.resume", "predict.dir", "monitor.mlflow.tracking_uri"):
        url = read(document, place, "")
        if isinstance(url, str) and (secret := describe_secret(url)):
            hint = "put it in the environment, or in a profile of the store's tools"
            yield place, f"{redact(url)} is refused: {secret}", hint
    for path, text in list_texts(document):
        if is_argument(document, path) and isinstance(text, str) and (secret := describe_secret(text)):
            hint = "write ${oc.env:NAME}, and put the whole URL in that environment variable"
            yield path, f"{redact(text)} is refused: {secret}", hint


@enter("secret-in-document", whole=True)
def _named_secret(document: Document) -> Iterator[Finding]:
    """A document is copied into each checkpoint and each run folder, and printed on request. A reference to an
    environment variable stays a reference in all of these."""
    for path, value in find_secrets(document):
        if not is_reference(value):
            override = f"{Problem('', path, 'secret-in-document').dotted}='${{oc.env:NAME}}'"
            hint = f"put it in an environment variable and write {override}"
            if path[-2:] == ("comet", "api_key"):  # no argument of a target, so it cannot be a reference
                hint = "set the environment variable COMET_API_KEY instead"
            yield path, "is refused: documents may not contain secrets", hint


@enter("output-not-local", whole=True)
def _local_output(document: Document) -> Iterator[Finding]:
    """Logs and metrics are appended to files, which object stores cannot do. Only checkpoints may be elsewhere."""
    directory = read(document, "output.dir", "")
    if isinstance(directory, str) and "://" in directory:
        shown = redact(directory)
        yield "output.dir", f"must be a local folder, but is {shown}", f"for checkpoints, set checkpoint.dir: {shown}"
    for place in ("monitor.tensorboard.output_path", "monitor.csv_monitor.output_path"):
        folder = read(document, place, "")
        if isinstance(folder, str) and "://" in folder:
            yield place, f"must be a local folder, but is {redact(folder)}", "leave it out to write to the run's folder"
