"""The command line: selects the command, and prints errors. Each command imports what it needs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from os import _exit  # the real one, which `exits` replaces
from typing import Any, NoReturn

from dsjob.contract import locations
from dsjob.contract.masked_output import watch_output
from dsjob.errors import DocumentError, DsjobError, Preempted, UsageError
from dsjob.ranks.signals import handling
from dsjob.terminal import print_error, print_lines, print_traceback, printable_warnings, quote_path, write_now
from dsjob.trust.exits import keep_exit_code

USAGE = """\
dsjob: train PyTorch models from a job document

  dsjob +recipe=NAME [key=value ...]     run a recipe (quickstart, zero2_gpt, vision_digits, ...)
  dsjob FILE [key=value ...]             run a job document (JSON or YAML)
  dsjob run FOLDER [key=value ...]       resume or extend the run in FOLDER
  dsjob -m ... key=a,b,c                 sweep: one run for each combination
  dsjob exec PROGRAM.py [ARGUMENT ...]   run an existing DeepSpeed program, unmodified, on dsjob's engine
  dsjob init [FOLDER]                    create a small project that is ready to train
  dsjob validate FILE... [key=value ...] check documents; report all problems at once
  dsjob show FILE | +recipe=NAME         print the resolved document
  dsjob schema [PATH]                    explain a key, or print the JSON Schema for editors
  dsjob import FILE... [-- COMMAND ...]  turn DeepSpeed configs, Trainer arguments, ... into a job
  dsjob plan FILE | +recipe=NAME         predict memory, communication and checkpoint size
  dsjob eval RUN|CKPT [key=value ...]    evaluate a checkpoint on data.eval and data.test
  dsjob predict RUN|CKPT [key=value ...] write its outputs for data.test, in the order of the data
  dsjob generate RUN|CKPT                let its model continue texts (--prompt TEXT), or ask for them
  dsjob compare-engines FILE             run a few steps with dsjob and DeepSpeed, and compare
  dsjob convert --to fp32 CKPT [OUT]     convert a checkpoint to plain weights
  dsjob runs [DIR]                       list runs; dsjob runs diff A B compares two
  dsjob report RUN...                    write curves and tables of runs to an HTML page
  dsjob ops [build [NAME ...]]           list the native ops, or build them ahead
  dsjob ckpt COMMAND CKPT                manage checkpoints: ls, info, verify, diff, gc, copy

  dsjob COMMAND --help                   show a command's options; so does dsjob help COMMAND
  --cfg job|hydra|all, --info,
  --config-dir DIR, --hydra-help,
  -sc install=bash                       as in every Hydra program
  --trust PREFIX                         trust a module or callable
  --trust protocol:NAME, folder:PLACE    allow a protocol of URLs; a folder or bucket
  --trust-remote-code, --unpinned        allow code from a hub; hub names without a revision
  --quiet, --json                        of a run: show only problems; print JSON lines
  --smoke                                of a run: first try a few steps, a save and a resume
  --debug                                show tracebacks
  --version                              print the version

examples:
  dsjob +recipe=quickstart
  dsjob cfg.yaml trainer.max_steps=100 launch.nproc=2
  dsjob run outputs/mine trainer.max_steps=200
  dsjob -m cfg.yaml optimizer.params.lr=1e-3,3e-4
"""

_WITH_OVERRIDES = ("run", "eval", "predict", "validate", "show", "plan", "compare-engines")
COMMANDS = (
    *("run", "exec", "init", "validate", "show", "plan", "schema", "import", "compare-engines", "eval", "predict"),
    "generate",
    *("convert", "runs", "report", "ops", "ckpt"),
)
_LOCAL_RANK = ("--local-rank=", "--local_rank=")  # torch.distributed.launch puts it first; RANK says the same


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code (see `errors`)."""
    with watch_output(), printable_warnings():
        code = _run(argv)
        if argv is None and code and "torch" in sys.modules:
            from dsjob.launch.rank import end_joined

            # A normal interpreter exit would wait for threads and workers, while the other ranks wait for this one.
            end_joined(code)
    if argv is None and code:
        keep_exit_code(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    launched = [
        word for word in arguments[:1] if word.startswith(_LOCAL_RANK)
    ]  # torch.distributed.launch puts it there
    del arguments[: len(launched)]
    if arguments[:1] == ["exec"]:
        arguments[1:1] = launched  # the program that it runs may want it
    # All else belongs to the program that it runs, or whose command `dsjob import` reads.
    own = arguments[: 2 if "exec" in arguments[:2] else arguments.index("--") if "--" in arguments else None]
    debug = "--debug" in own
    try:
        with handling({signal.SIGINT: _leave}):
            code = _dispatch([word for word in own if word != "--debug"] + arguments[len(own) :], debug)
        sys.stdout.flush()  # here, so that a closed pipe raises BrokenPipeError below and not at interpreter exit
        return code
    except DsjobError as error:
        if debug:
            print_traceback(error)
        elif isinstance(error, Preempted) or error.exit_code == 130:  # the user asked for it: not an error
            print_error(f"dsjob: {error}")
        else:
            _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print_error("dsjob: interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout again at exit
        return 141
    except Exception as error:
        if debug:
            print_traceback(error)
            return 1
        from dsjob.trust.frames import describe_failure, hint_at_failure

        _print_error(DsjobError(describe_failure(error), hint=hint_at_failure(error)))
        return 1


def _leave(number: int, _: Any) -> NoReturn:
    """Handles Ctrl-C before a job starts. An exception could be swallowed inside a third party's import."""
    write_now("dsjob: interrupted")
    _exit(130)


def _dispatch(arguments: list[str], debug: bool) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        print_lines(*USAGE.splitlines())
        return 0
    if first == "--version":
        import dsjob

        print_lines(f"dsjob {dsjob.__version__}")
        return 0
    if first == "help":
        return _dispatch([*_require_command(arguments[1:2]), "--help"], debug)
    if first in COMMANDS:
        command, rest = first, arguments[1:]
    else:
        command, rest = "run", arguments
    if command in _WITH_OVERRIDES:
        from dsjob.cli.overrides import require_overrides

        require_overrides(rest)
    if first not in COMMANDS:
        _require_runnable(first)
    locations.allow(_read_granted)
    module = import_module(f"dsjob.cli.{command.replace('-', '_')}{'_' if iskeyword(command) else ''}")
    code: int = module.main(rest, debug)
    return code


def _require_command(words: list[str]) -> list[str]:
    """`words`. Raises UsageError if they are not the name of a command."""
    if words and words[0] not in COMMANDS:
        from dsjob.contract.hints import suggest

        hint = suggest(words[0], COMMANDS) or "dsjob help lists the commands"
        raise UsageError(f"unknown command {words[0]!r}", hint=hint)
    return words


def _read_granted() -> tuple[str, ...]:
    from dsjob.trust.user import read_granted

    return read_granted()


def parse_count(text: str) -> int:
    """A number of ranks or steps among a command's arguments: at least 1."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, but is {text[:20]!r}")
    return int(text)


def _require_runnable(first: str) -> None:
    """Raises UsageError if the first argument is neither a file, nor a URL, nor an override."""
    exists = os.path.exists(first) and not first.endswith((".py", ".sh"))
    if first[:1] in "-+~" or "=" in first or "://" in first or exists:
        return
    if first.endswith((".json", ".yaml", ".yml", ".jsonc")) or "/" in first:
        from dsjob.front.refused import refuse_missing

        raise refuse_missing(first)
    if first in _list_recipes():
        raise UsageError(f"{first} is a recipe, not a command", hint=f"run dsjob +recipe={first}")
    from dsjob.contract.hints import suggest

    meant = suggest(first, [*COMMANDS, *_list_recipes()])
    recipe = next((name for name in _list_recipes() if f'"{name}"' in meant), "")
    hint = f"did you mean the recipe {recipe}? dsjob +recipe={recipe}" if recipe else meant
    hint = hint or "dsjob --help lists the commands"
    if first.endswith((".py", ".sh")):
        quoted = quote_path(first)
        run = f"run it unmodified: dsjob exec {'--no_python ' * first.endswith('.sh')}{quoted} ..."
        hint = (
            f"a job is a document, not a program; {run}; or convert its arguments: dsjob import -- python {quoted} ..."
        )
    raise UsageError(f"unknown command or file {first!r}", hint=hint)


def _list_recipes() -> list[str]:
    from importlib import resources

    names = [item.name for item in resources.files("dsjob.conf").joinpath("recipe").iterdir()]
    return [name.removesuffix(".yaml") for name in names]


def _print_error(error: DsjobError) -> None:
    if isinstance(error, DocumentError):
        print_lines(*map(str, error.problems), file=sys.stderr)
    else:
        print_error(f"dsjob: error: {error}")
