"""`dsjob run`, and `dsjob` without a command: compose, check, resolve, launch; Hydra's own flags and sweeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from dsjob import storage
from dsjob.cli.execute import run_composed
from dsjob.cli.overrides import is_override
from dsjob.cli.refused import refuse_missing, require_own
from dsjob.cli.trusted import add_arguments, allow_protocols, grant, read_environment
from dsjob.contract.secrets import hide_secrets
from dsjob.document import Document
from dsjob.document import compose as composition
from dsjob.document.origins import STDIN, Composed, is_deepspeed, read_document
from dsjob.errors import UnsavedError, UsageError
from dsjob.launch import launcher
from dsjob.launch.rank import end_rank
from dsjob.run_folder import RESOLVED_NAME
from dsjob.training.advice import train_longer

_SWEEP = "optimizer.params.lr=1e-3,3e-4"


def main(arguments: list[str], debug: bool) -> int:
    """Runs a recipe or a job file, sweeps, or answers one of Hydra's questions."""
    args = composition.parse_arguments(arguments, add_arguments)
    if args.help:
        from dsjob.cli import USAGE

        sys.stdout.write(USAGE)
        return 0
    allow_protocols(args.trust)
    file, overrides = split_source(args.overrides)
    trust = grant(file, args)
    if args.multirun:
        if file is not None and file.source == STDIN:
            raise UsageError("a sweep reads its document once for each run: give it a file, not standard input")
        from dsjob.cli import sweep

        return sweep.main(overrides, file, args.config_dir, debug, trust)
    if args.cfg == "job":
        composed = composition.compose(overrides, file=file, config_dir=args.config_dir, environment=read_environment())
        _print_yaml(composed.document, args.package)
        return 0
    if args.cfg or args.info or args.shell_completion or args.hydra_help:
        composition.answer(args, overrides, file)
        return 0
    composed = composition.compose(overrides, file=file, config_dir=args.config_dir, environment=read_environment())
    result = run_composed(composed, trust, debug)
    if result.get("status") == "unsaved":
        raise UnsavedError(
            f"the run reached step {result['step']}, but its final state could not be saved: {result['error']}",
            hint=f"correct the cause, then repeat the steps since the last checkpoint: dsjob run {result['run_dir']}",
        )
    if result.get("checkpoint"):
        _say_next(result, composed)
    if launcher.read_world_size() is not None:
        end_rank(0)
    return 0


def split_source(overrides: Sequence[str], *, bare: bool = False) -> tuple[Document | None, list[str]]:
    """The job file among the arguments, read, and what remains. A run's folder stands for its document.

    `bare`: a DeepSpeed config may stand alone, and is then what a job without anything else builds on.
    """
    words = [word for word in overrides if not is_override(word)]
    rest = [word for word in overrides if word not in words]
    if not words:
        return None, rest
    if len(words) > 1:
        raise UsageError(f"one job file at a time, not {', '.join(words)}")
    source = words[0]
    if "://" not in source and os.path.isdir(source):
        resolved = os.path.join(source, RESOLVED_NAME)
        if not os.path.exists(resolved):
            above = os.path.dirname(source.rstrip("/"))
            hint = f"dsjob run {above}" if os.path.exists(os.path.join(above, RESOLVED_NAME)) else ""
            raise UsageError(f"{source} is not a run folder: there is no {RESOLVED_NAME} in it", hint=hint)
        document = read_document(resolved)
        _require_same_places(source.rstrip("/") or "/", document.value, rest)
        here = f"output.dir={_quote(source.rstrip('/') or '/')}"
        return document, ["checkpoint.resume=auto", *rest, here]
    if not ("://" in source or source == "-" or os.path.exists(source)):
        raise refuse_missing(source)
    document = read_document(source)
    if is_deepspeed(document.value):
        if bare and source != "-":
            return None, [f"deepspeed={_quote(source)}", *rest]
        raise UsageError(
            f"{source} is a DeepSpeed config: it says how to train, but not what",
            hint=f"build a job on it: dsjob +recipe=quickstart deepspeed={source}",
        )
    require_own(document)
    if os.path.basename(source) == RESOLVED_NAME and "://" not in source:
        folder = os.path.dirname(source) or "."
        section = document.value.get("output")
        output = section.get("dir") if isinstance(section, dict) else None
        if isinstance(output, str) and os.path.abspath(os.path.expanduser(output)) == os.path.abspath(
            folder
        ):  # a new run, not more of that one
            rest = [f"output.dir={_quote(output.rstrip('/') + '-%time')}", *rest]
    return document, rest


def _require_same_places(folder: str, document: Any, overrides: Sequence[str]) -> None:
    """Refuses overrides by which a run would not go on from where it is. Raises UsageError."""
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    given = {key: value.strip("'\"") for key, _, value in pairs if key in ("output.dir", "checkpoint.dir")}
    out = given.get("output.dir")
    if out is not None and os.path.abspath(out) != os.path.abspath(folder):
        raise UsageError(
            f"output.dir={out}: dsjob run {folder} resumes the run in that folder, and writes nowhere else",
            hint=f"start another run with dsjob run {folder}/{RESOLVED_NAME} output.dir={out}",
        )
    section = document.get("checkpoint") if isinstance(document, dict) else None
    before = (section.get("dir") if isinstance(section, dict) else None) or f"{folder}/checkpoints"
    after = given.get("checkpoint.dir", before)
    if after != before and not storage.list_names(storage.join(after, "commits")):
        raise UsageError(
            f"checkpoint.dir={after} holds no checkpoint: the run in {folder} keeps its checkpoints in {before}",
            hint=f"copy them first with dsjob ckpt copy {before} {after}",
        )


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _say_next(result: dict[str, Any], composed: Composed) -> None:
    """The commands that a user may want now, ready to be pasted."""
    run_dir, trainer = result["run_dir"], composed.document["trainer"]
    limits = trainer.get("max_steps"), trainer.get("max_epochs")
    longer = train_longer(*limits, step=result["step"], epochs=result.get("epochs"))
    form, out = ("hf", "model") if result.get("pretrained") else ("fp32", "weights")
    again = f"{run_dir}/{RESOLVED_NAME}"
    lines = (
        ("train on", f"dsjob run {run_dir} {longer}"),
        ("convert", f"dsjob convert --to {form} {result['checkpoint'].rpartition('/')[0]} {run_dir}/{out}"),
        ("repeat", f"dsjob run {again}"),
        ("sweep", f"dsjob -m {f'+recipe={composed.recipes[0]}' if composed.recipes else again} {_sweep(composed)}"),
    )
    print("next", *(f"  {name:<10} {command}" for name, command in lines), sep="\n")  # noqa: T201


def _sweep(composed: Composed) -> str:
    schedule = composed.document.get("scheduler", {}).get("params", {})
    if (
        not composed.recipes and "warmup_max_lr" in schedule
    ):  # a resolved document's own, which goes over the optimizer's
        return "scheduler.params.warmup_max_lr=1e-3,3e-4"
    own = [name for name, entry in composed.document.get("models", {}).items() if "optimizer" in entry]
    return _SWEEP if "optimizer" in composed.document or not own else f"models.{own[0]}.{_SWEEP}"


def _print_yaml(document: dict[str, Any], package: str | None) -> None:
    from dsjob.cli.output import to_yaml

    value: Any = hide_secrets(document)
    for part in package.split(".") if package and package != "_global_" else []:
        if not isinstance(value, dict) or part not in value:
            raise UsageError(f"there is no {package} in the document")
        value = value[part]
    sys.stdout.write(to_yaml(value))
