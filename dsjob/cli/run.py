"""`dsjob run`, and `dsjob` without a command: composes, checks, resolves and launches a job. Also handles sweeps and
Hydra's own flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from dsjob.cli.flags import add_arguments, add_form, allow_granted, make_parser, read_flags
from dsjob.cli.overrides import is_override
from dsjob.contract.lengths import read_length
from dsjob.contract.paths import get_at
from dsjob.contract.secrets import hide_secrets, hide_value
from dsjob.document import Document
from dsjob.document import compose as composition
from dsjob.document.origins import STDIN, Composed
from dsjob.errors import UnsavedError, UsageError
from dsjob.front.execute import run_composed
from dsjob.front.source import read_source
from dsjob.launch import launcher
from dsjob.launch.rank import end_rank
from dsjob.run_folder import RESOLVED_NAME, read_resolved
from dsjob.terminal import print_block, print_lines, printable_output, quote_path, quote_word
from dsjob.training.advice import train_longer, wait_longer
from dsjob.training.form import Form, showing
from dsjob.trust.user import grant, read_environment

_LIMITS = ("max_steps", "max_epochs", "max_length")
_SWEEP = "optimizer.params.lr=1e-3,3e-4"


def main(arguments: list[str], debug: bool) -> int:
    """Runs a recipe or a job file, runs a sweep, or handles one of Hydra's flags."""
    args = composition.parse_arguments(arguments, _add_flags)
    if args.help:
        print_block(make_help().format_help())
        return 0
    allow_granted(args.trust)
    if not (args.overrides or args.cfg or args.info or args.shell_completion or args.hydra_help):
        raise UsageError(
            "dsjob run needs a file, a run's folder or a recipe", hint="dsjob run cfg.yaml, or dsjob +recipe=quickstart"
        )
    file, overrides = split_source(args.overrides)
    trust = grant(file, read_flags(args))
    if args.multirun and (args.smoke or args.smoke_only):
        raise UsageError("a sweep has no smoke run", hint="dsjob run --smoke-only FILE key=value, without --multirun")
    form: Form = "json" if args.json else "quiet" if args.quiet else ""
    if args.multirun:
        if file is not None and file.source == STDIN:
            raise UsageError("a sweep reads its document for each run: pass a file, not standard input")
        from dsjob.cli import sweep

        with showing(form):
            return sweep.main(overrides, file, args.config_dir, debug, trust)
    if args.cfg == "job":
        composed = composition.compose(overrides, file=file, config_dir=args.config_dir, environment=read_environment())
        _print_yaml(composed.document, args.package)
        return 0
    if args.shell_completion and any(word.startswith("query=") for word in overrides):
        from dsjob.cli import COMMANDS
        from dsjob.cli.completion import complete_command

        if found := complete_command(COMMANDS):
            print_lines(" ".join(found))
            return 0
    if args.cfg or args.info or args.shell_completion or args.hydra_help:
        with printable_output():
            composition.answer(args, overrides, file)
        return 0
    environment = read_environment()
    composed = composition.compose_known(overrides, file=file, config_dir=args.config_dir, environment=environment)
    with showing(form):
        result = run_composed(
            composed, trust, debug, smoke="only" if args.smoke_only else "first" if args.smoke else ""
        )
    if result.get("status") == "unsaved" and launcher.is_first():
        raise UnsavedError(
            f"the run reached step {result['step']}, but its final state could not be saved: {result['error']}",
            hint="fix the cause, then repeat the steps since the last checkpoint:"
            f" dsjob run {quote_path(result['run_dir'])}",
        )
    if form == "json" and result and launcher.is_first():
        print_lines(json.dumps({"event": "result", **result}))
    trains = "train" in composed.document.get("tasks", ["train"])
    if not form and result.get("checkpoint") and trains and launcher.is_first():
        _print_next(result, composed, args.config_dir)
    if launcher.read_world_size() is not None:
        end_rank(0)
    return 0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_form(parser)
    what = "a few steps, an evaluation, a save, a resume and a conversion in a temporary folder"
    smoke = parser.add_mutually_exclusive_group()
    smoke.add_argument("--smoke", action="store_true", help=f"first try {what}")
    smoke.add_argument("--smoke-only", action="store_true", help="only try these, and start nothing")
    add_arguments(parser)


def make_help() -> argparse.ArgumentParser:
    """The parser that only prints `dsjob run --help`. Hydra's parser reads the arguments, but explains less."""
    parser = make_parser(
        "run",
        "Run a job document, a recipe or a sweep, or resume a run. `dsjob` without a command does the same.",
        (
            "dsjob +recipe=quickstart",
            "dsjob run cfg.yaml trainer.max_steps=100 launch.nproc=2",
            "dsjob run outputs/mine trainer.max_steps=200",
            "dsjob run -m cfg.yaml optimizer.params.lr=1e-3,3e-4",
            "dsjob run cfg.yaml --json | jq .loss",
            "dsjob run cfg.yaml --smoke",
            "dsjob run cfg.yaml --cfg job",
        ),
        usage="dsjob [run] [flags] [FILE | FOLDER] [+recipe=NAME] [key=value ...]",
        add_help=False,
    )
    for name, text in (
        ("FILE", "a job document: JSON or YAML, a path or URL; - reads standard input"),
        ("FOLDER", "a run's folder: resumes that run, or extends it with trainer.max_steps=N"),
        ("+recipe=NAME", "build on a recipe: quickstart, zero2_gpt, zero3_t5, vision_digits, ..."),
        ("key=value", "change a value of the document, for example optimizer.params.lr=1e-3; ~key removes one"),
    ):
        parser.add_argument(name, help=text)
    for names, metavar, text in (
        (("--help", "-h"), None, "show this help"),
        (("--multirun", "-m"), None, "sweep: one run for each combination of key=a,b,c"),
        (("--cfg", "-c"), "job|hydra|all", "print the composed document instead of running it"),
        (("--package", "-p"), "PATH", "with --cfg: only this section"),
        (("--info", "-i"), "WHAT", "print information from Hydra, for example searchpath or defaults-tree"),
        (("--config-dir", "-cd"), "DIR", "a folder with recipes and groups of your own"),
        (("--shell-completion", "-sc"), "install=SHELL", "print the completion script for bash, fish or zsh"),
        (("--hydra-help",), None, "explain Hydra's other flags"),
        (("--debug",), None, "show tracebacks"),
    ):
        if metavar:
            parser.add_argument(*names, metavar=metavar, help=text)
        else:
            parser.add_argument(*names, action="store_true", help=text)
    _add_flags(parser)
    return parser


def split_source(words: Sequence[str], *, bare: bool = False) -> tuple[Document | None, list[str]]:
    """Reads the job file among the arguments; returns it with the overrides. `bare` as in `read_source`."""
    sources = [word for word in words if not is_override(word)]
    overrides = [word for word in words if word not in sources]
    if not sources:
        return None, overrides
    if len(sources) > 1:
        raise UsageError(f"only one job file at a time, not {', '.join(sources)}")
    return read_source(sources[0], overrides, bare=bare)


def _print_next(result: dict[str, Any], composed: Composed, config_dir: str | None) -> None:
    """Prints commands that a user may want to run next, ready to paste."""
    run_dir, trainer = result["run_dir"], composed.document["trainer"]
    length = trainer.get("max_length")
    limits = trainer.get("max_steps"), trainer.get("max_epochs"), None if length is None else read_length(length)
    longer = train_longer(*limits, step=result["step"], epochs=result.get("epochs"))
    if stopped := result.get("stopped"):  # the length is not reached yet
        longer = wait_longer(composed.document.get("callbacks", {}), stopped)
    form, out = ("hf", "model") if result.get("pretrained") else ("fp32", "weights")
    again = quote_path(f"{run_dir}/{RESOLVED_NAME}")
    base = quote_word(f"+recipe={composed.recipes[0]}") if composed.recipes else again
    if composed.recipes and config_dir is not None:  # where the recipe may lie
        base = f"--config-dir {quote_path(config_dir)} {base}"
    flag = "" if result.get("best_step") is None else "--best "
    folder, saved = quote_path(run_dir), quote_path(result["checkpoint"].rpartition("/")[0])
    lines = (
        ("continue", " ".join(filter(None, ["dsjob run", folder, longer, *_find_unused(composed, run_dir)]))),
        ("convert", f"dsjob convert {flag}--to {form} {saved} {quote_path(f'{run_dir}/{out}')}"),
        ("repeat", f"dsjob run {again}"),
        ("sweep", f"dsjob -m {base} {quote_word(_sweep(composed))}"),
    )
    print_lines("next", *(f"  {name:<10} {command}" for name, command in lines))


def _find_unused(composed: Composed, run_dir: str) -> list[str]:
    """The overrides that a run has not taken, because it was finished: its folder keeps the values it trained with."""
    kept = read_resolved(run_dir)
    found = []
    for path, override in composed.overrides.items():
        before, value = get_at(kept, path, None), get_at(composed.document, path, None)
        # Not `auto` and old keys, which are resolved to other values, and not what `longer` sets.
        taken = value == "auto" or _contains(before, value)
        if None not in (before, value) and not taken and path[-1] not in _LIMITS:
            found.append(quote_word(hide_value(override)))
    return found


def _contains(kept: Any, value: Any) -> bool:
    """Whether a resolved value, which also has defaults, is the given one."""
    if isinstance(kept, dict) and isinstance(value, dict):
        return all(_contains(kept.get(key), item) for key, item in value.items())
    return bool(kept == value)


def _sweep(composed: Composed) -> str:
    schedule = composed.document.get("scheduler", {}).get("params", {})
    # A resolved document has warmup_max_lr, which overrides the optimizer's rate: sweeping that would change nothing.
    if not composed.recipes and "warmup_max_lr" in schedule:
        return "scheduler.params.warmup_max_lr=1e-3,3e-4"
    own = [name for name, entry in composed.document.get("models", {}).items() if "optimizer" in entry]
    return _SWEEP if "optimizer" in composed.document or not own else f"models.{own[0]}.{_SWEEP}"


def _print_yaml(document: dict[str, Any], package: str | None) -> None:
    from dsjob.cli.output import to_yaml

    value: Any = hide_secrets(document)
    for part in package.split(".") if package and package != "_global_" else []:
        if not isinstance(value, dict) or part not in value:
            raise UsageError(f"the document has no {package}")
        value = value[part]
    print_block(to_yaml(value))
