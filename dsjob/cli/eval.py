"""`dsjob eval`: evaluates a checkpoint with the job that saved it."""

from __future__ import annotations

import argparse
import json

from dsjob.cli.flags import add_arguments, add_choice, add_form, allow_granted, make_parser, read_flags
from dsjob.cli.overrides import is_override
from dsjob.errors import UsageError
from dsjob.front.checkpoint import choose_checkpoint
from dsjob.front.execute import run_composed
from dsjob.front.tasks import Task, make_task
from dsjob.launch import launcher
from dsjob.launch.rank import end_rank
from dsjob.terminal import print_lines
from dsjob.training.form import Form, showing


def main(arguments: list[str], debug: bool) -> int:
    """Evaluates, and prints the metrics."""
    parser = make_task_parser(
        "eval",
        "Evaluate a checkpoint on data.eval and data.test of the job that saved it. The metrics are printed, and "
        "written to result.json in the folder eval-TAG of the run.",
        (
            "dsjob eval runs/a",
            "dsjob eval runs/a --best launch.nproc=2",
            "dsjob eval runs/a --tag step-00000100",
            "dsjob eval s3://bucket/a/checkpoints trainer.micro_batch=64 output.dir=evaluated",
        ),
    )
    add_form(parser)
    return perform("eval", parser.parse_intermixed_args(arguments), debug)


def make_task_parser(task: Task, description: str, examples: tuple[str, ...]) -> argparse.ArgumentParser:
    """The parser of a command that performs a task with a checkpoint."""
    parser = make_parser(task, description, examples, usage=f"dsjob {task} RUN|CKPT [flags] [key=value ...]")
    source = "a run's folder, a folder of checkpoints, or a single checkpoint, a path or URL; then key=value changes "
    source += "of the job that saved it"
    parser.add_argument("words", nargs="*", metavar="RUN|CKPT|key=value", help=source)
    add_choice(parser)
    ema = "use averages of weights (dsjob.callbacks.EMA) instead of the weights"
    parser.add_argument("--ema", action="store_true", help=ema)
    add_arguments(parser)
    return parser


def perform(task: Task, args: argparse.Namespace, debug: bool) -> int:
    """Performs a task with the checkpoint that the arguments name."""
    allow_granted(args.trust)
    named, overrides = split_words(task, args.words)
    chosen = choose_checkpoint(named, args.tag, best=args.best)
    source = make_task(task, chosen, overrides, ema=args.ema)
    form: Form = "json" if args.json else "quiet" if args.quiet else ""
    with showing(form):
        result = run_composed(source.compose(), chosen.grant(read_flags(args)), debug)
    if launcher.is_first() and form != "quiet":
        shown = json.dumps({"event": "result", **result}) if form else f"result  {result['run_dir']}/result.json"
        print_lines(shown)
    if launcher.read_world_size() is not None:
        end_rank(0)
    return 0


def split_words(task: Task, words: list[str]) -> tuple[str, list[str]]:
    """The checkpoint that the words of a command name, and the overrides among them. Raises UsageError."""
    sources = [word for word in words if not is_override(word)]
    if len(sources) != 1:
        given = f"one checkpoint, not {', '.join(sources)}" if sources else "a run's folder or a checkpoint"
        raise UsageError(f"dsjob {task} needs {given}", hint=f"dsjob {task} outputs/mine")
    return sources[0], [word for word in words if is_override(word)]
