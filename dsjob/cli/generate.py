"""`dsjob generate`: lets the model of a checkpoint continue texts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from typing import Any

from dsjob import storage
from dsjob.cli.eval import make_task_parser, split_words
from dsjob.cli.flags import allow_granted, read_flags
from dsjob.errors import DsjobError, UsageError
from dsjob.front.checkpoint import choose_checkpoint
from dsjob.front.execute import run_composed
from dsjob.front.generate import choose_settings, load_writer, make_generation, read_rows, writing
from dsjob.launch import launcher
from dsjob.launch.rank import end_rank
from dsjob.terminal import print_error, print_lines, print_text
from dsjob.training.form import showing

# Flag, type, key of the section `generation`.
_SETTINGS = (
    ("--max-new-tokens", int, "max_new_tokens"),
    ("--num-beams", int, "num_beams"),
    ("--temperature", float, "temperature"),
    ("--top-k", int, "top_k"),
    ("--top-p", float, "top_p"),
)
_SAMPLING = {"temperature", "top_k", "top_p"}  # without sampling, transformers ignores them


def main(arguments: list[str], debug: bool) -> int:
    """Prints what the model writes for each prompt."""
    args = _make_parser().parse_intermixed_args(arguments)
    allow_granted(args.trust)
    named, overrides = split_words("generate", args.words)
    settings = {key: value for _, _, key in _SETTINGS if (value := getattr(args, key)) is not None}
    settings |= {"do_sample": True} if args.do_sample or _SAMPLING & settings.keys() else {}
    if not args.prompt and args.prompts is None:
        if not sys.stdin.isatty():
            raise UsageError("there is no prompt", hint="use --prompt TEXT, or --prompts FILE (- for stdin)")
        return _converse(named, overrides, settings, args)
    file = _generate(named, overrides, settings, args, debug)
    if launcher.is_first():
        _show(file, args)
    if launcher.read_world_size() is not None:
        end_rank(0)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = make_task_parser(
        "generate",
        "Let the model of a checkpoint continue texts. It needs a method generate, which language models of "
        "transformers have. Without --prompt and --prompts, dsjob asks for prompts until Ctrl-D.",
        (
            "dsjob generate runs/a --prompt 'Once upon a time' --max-new-tokens 50",
            "dsjob generate runs/a --prompts questions.jsonl --out answers.jsonl launch.nproc=2",
            "dsjob generate runs/a --best --tokenizer path/to/tokenizer",
        ),
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; repeatable")
    parser.add_argument("--prompts", metavar="FILE", help="a text per line, or JSONL with `prompt`; - for stdin")
    parser.add_argument("--tokenizer", metavar="NAME", help="`bytes`, or a tokenizer's folder (default: the job's)")
    parser.add_argument("--out", metavar="FILE", help="also write JSONL with prompt, generated and text")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--do-sample", action="store_true", help="sample instead of taking the likeliest token")
    for flag, kind, key in _SETTINGS:
        implied = "; implies --do-sample" if key in _SAMPLING else ""
        parser.add_argument(flag, type=kind, metavar="N", help=f"see generation.{key}{implied}")
    return parser


def _generate(
    source: str, overrides: list[str], settings: dict[str, Any], args: argparse.Namespace, debug: bool
) -> str:
    """The file that was written."""
    if args.out:
        storage.make_folder(os.path.dirname(args.out) or ".")  # before anything costs time
    chosen = choose_checkpoint(source, args.tag, best=args.best)
    section = choose_settings(chosen, args.tokenizer, settings, overrides)
    with ExitStack() as stack:
        prompts = args.prompt
        if args.prompts is not None and prompts:
            raise UsageError("--prompt and --prompts exclude each other", hint="put all prompts into the file")
        if args.prompts is not None:
            from dsjob.text.prompts import read_prompts

            if args.prompts == "-":
                prompts = read_prompts(sys.stdin.read(), "the standard input")
            else:  # the ranks read it; here, before anything costs time, its mistakes are found
                read_prompts(storage.read_text(args.prompts), args.prompts)
        file = args.prompts if args.prompts not in (None, "-") else stack.enter_context(writing(prompts))
        if which := chosen.describe_weights(ema=args.ema):
            print_error(f"weights  {which}")
        composed = make_generation(chosen, file, section, overrides, tokenizer=args.tokenizer, ema=args.ema).compose()
        stack.enter_context(showing("quiet"))
        (written,) = run_composed(composed, chosen.grant(read_flags(args)), debug)["predictions"]
    return str(written)


def _show(file: str, args: argparse.Namespace) -> None:
    rows = read_rows(file)
    for row in rows:
        if args.json:
            print_lines(json.dumps(row))
        elif len(rows) == 1:
            print_text(row["text"], indented=False)
        else:
            print_text(f"> {row['prompt']}")
            print_text(row["text"], indented=False)
            print_lines("")
    if args.out:  # at last: where it cannot be written, the texts are on the screen
        storage.write_bytes(args.out, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def _converse(source: str, overrides: list[str], settings: dict[str, Any], args: argparse.Namespace) -> int:
    """Asks for prompts on the terminal, and answers each in this process."""
    if overrides:
        raise UsageError("changes of the job need --prompt or --prompts", hint="asking for prompts uses one process")
    write = load_writer(
        source,
        tag=args.tag,
        best=args.best,
        ema=args.ema,
        tokenizer=args.tokenizer,
        settings=settings,
        flags=read_flags(args),
    )
    which = choose_checkpoint(source, args.tag, best=args.best).describe_weights(ema=args.ema)
    print_lines(f"{source}{which and f' ({which})'}: write a prompt; Ctrl-D ends")
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            print_lines("")
            return 0
        if prompt:
            try:
                print_text(write(prompt), indented=False)
            except DsjobError as error:  # of this prompt, such as one that is too long
                print_text(f"error: {error}")
