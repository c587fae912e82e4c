"""`dsjob.evaluate` and `dsjob.predict`: use a checkpoint with the job that saved it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsjob.contract.masked_output import watch_output
from dsjob.document.sizes import read_nproc
from dsjob.errors import UsageError
from dsjob.front.checkpoint import Chosen, choose_checkpoint
from dsjob.front.execute import run_composed
from dsjob.front.process import keeping_process, require_no_group
from dsjob.front.run import naming_no_flags, one_at_a_time
from dsjob.front.source import (
    Source,
    allowing,
    list_words,
    make_flags,
    name_change,
    quote,
    require_path,
    telling_places,
)
from dsjob.launch import launcher
from dsjob.terminal import quote_word
from dsjob.trust.grant import Trust

Task = Literal["eval", "predict", "generate"]


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    metrics: by name, such as `eval/loss`. checkpoint: the folder of the checkpoint, whose weights were used. step: the
    step at which it was saved. run_dir: the folder with the evaluation's own files.
    """

    metrics: Mapping[str, float]
    checkpoint: str
    step: int
    run_dir: str


@dataclass(frozen=True)
class Predictions:
    """The result of predicting.

    files: the path or URL of each set's file, in the order of the sets. The other fields are those of `Evaluation`.
    """

    files: Sequence[str]
    checkpoint: str
    step: int
    run_dir: str


def evaluate(
    checkpoint: str | os.PathLike[str],
    *,
    tag: str | None = None,
    best: bool = False,
    ema: bool = False,
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
    trust_remote_code: bool = False,
    unpinned: bool = False,
) -> Evaluation:
    """Evaluates a checkpoint on data.eval and data.test, like the command `dsjob eval`.

    checkpoint: the path or URL of a run's folder, a checkpoint folder, or the folder of one step in it. tag: the
    checkpoint to evaluate (default: the newest). best: evaluate the best one by checkpoint.best of the job. ema: use
    averages of weights (dsjob.callbacks.EMA) instead of the weights. overrides: changes to the job that saved it, such
    as `data.eval.split=test` or `launch.nproc=2`. The number of ranks, the ZeRO stage and the micro batch are free.

    The process and the trust rules are as for `run` and `load_model`. Raises the errors of both.
    """
    result = _perform("eval", checkpoint, tag, best, ema, overrides, trust, trust_remote_code, unpinned)
    return Evaluation(result["metrics"], result["checkpoint"], result["step"], result["run_dir"])


def predict(
    checkpoint: str | os.PathLike[str],
    *,
    tag: str | None = None,
    best: bool = False,
    ema: bool = False,
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
    trust_remote_code: bool = False,
    unpinned: bool = False,
) -> Predictions:
    """Writes what the model of a checkpoint returns for each sample of data.test, or without one, of data.eval. Like
    the command `dsjob predict`.

    overrides: changes to the job that saved the checkpoint, such as `predict.format=safetensors`. The other arguments,
    and what is raised, are as for `evaluate`.
    """
    result = _perform("predict", checkpoint, tag, best, ema, overrides, trust, trust_remote_code, unpinned)
    return Predictions(result["predictions"], result["checkpoint"], result["step"], result["run_dir"])


def _perform(
    task: Task,
    checkpoint: object,
    tag: str | None,
    best: bool,
    ema: bool,
    overrides: Sequence[str],
    trust: Sequence[str],
    trust_remote_code: bool,
    unpinned: bool,
) -> dict[str, Any]:
    """The contents of result.json."""
    flags = make_flags(trust, trust_remote_code, unpinned)
    with one_at_a_time(), allowing(flags), watch_output(), telling_places():
        chosen = choose_checkpoint(require_path(checkpoint, "a checkpoint"), tag, best=best)
        return perform(make_task(task, chosen, list_words(None, overrides), ema=ema), chosen.grant(flags))


def perform(source: Source, trust: Trust) -> dict[str, Any]:
    """Runs the job of a task from a program. Returns the contents of result.json."""
    composed = source.compose()
    here = launcher.read_world_size() is not None or read_nproc(composed.document) == 1
    if here:
        require_no_group()
    with keeping_process(torch=here), naming_no_flags(here):
        return run_composed(composed, trust, debug=False)


def make_task(task: Task, chosen: Chosen, overrides: Sequence[str], *, ema: bool = False) -> Source:
    """The job that performs a task with a checkpoint: the job that saved it, with other tasks.

    Its files go to `TASK-TAG` in the run's folder, unless `overrides` set output.dir. Raises UsageError.
    """
    if chosen.file is None:
        hint = f"write a job, and run it with 'tasks=[{task}]' {name_change('checkpoint.resume', chosen.url)}"
        raise UsageError(f"{chosen.url} does not contain its job", hint=hint)
    for word in overrides:
        if word.lstrip("+").partition("=")[0] == "checkpoint.resume":
            hint = f"for other weights, run the job itself with 'tasks=[{task}]' {quote_word(word)}"
            raise UsageError(f"{word}: dsjob {task} uses the checkpoint that it is given, {chosen.url}", hint=hint)
    url = os.path.abspath(chosen.url) if "://" not in chosen.url else chosen.url
    folder = os.path.join(chosen.run_dir or os.path.join("outputs", "%name"), f"{task}-{chosen.tag}")
    # Only the micro batch matters. Without the sizes of a training step, any number of ranks is possible.
    sizes = ["trainer.train_batch=null", "trainer.grad_accum=null", "resolved.world_size=null"]
    tasks = f"tasks=[{'predict' if task == 'generate' else task}]"
    sizes.append(f"++checkpoint.ema={str(ema).lower()}")
    given = [f"output.dir={quote(folder)}", *overrides, tasks, f"checkpoint.resume={quote(url)}"]
    return Source(chosen.file, [*sizes, *given])
