"""`dsjob validate`: reports all problems of all documents at once, without importing torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace

from dsjob.cli import parse_count
from dsjob.cli.flags import add_arguments, allow_granted, make_parser, read_flags
from dsjob.cli.overrides import is_override
from dsjob.contract import report
from dsjob.contract.rules import EXPLANATIONS, RULES
from dsjob.errors import Problem, UsageError
from dsjob.front.validate import name_source, validate_file, validate_recipe
from dsjob.terminal import print_block, print_lines
from dsjob.trust.user import config_path, read_config


def main(arguments: list[str], debug: bool) -> int:
    """Prints the problems. Returns 2 if there is an error, otherwise 0."""
    args = _parse(arguments)
    if args.explain is not None:
        _explain(args.explain)
        return 0
    allow_granted(args.trust)
    overrides = [word for word in args.files if is_override(word)]
    args.files = [word for word in args.files if word not in overrides]
    recipe = next((word for word in overrides if word.startswith("+recipe=")), "")
    if not args.files and not recipe:
        raise UsageError(
            "dsjob validate needs a file or a recipe",
            hint="dsjob validate cfg.json, or dsjob validate +recipe=quickstart; - reads standard input",
        )
    if overrides and len(args.files) > 1:
        message = f"overrides need exactly one document, not {len(args.files)}"
        raise UsageError(message, hint=f"the first override is {overrides[0]}")
    read_config(config_path())  # a mistake in the user's own config file is no problem of a document: raise it here
    found: list[Problem] = []
    flags, deep = read_flags(args), bool(args.deep)
    for url in args.files or [recipe]:
        lengths: list[str] = []
        if args.files:
            problems, texts = validate_file(url, args.world_size, overrides, flags, deep=deep, lengths=lengths)
        else:
            problems, texts = validate_recipe(overrides, args.world_size, flags, deep=deep, lengths=lengths), {}
        if args.strict:
            problems = [replace(problem, severity="error") for problem in problems]
        if args.format == "text":
            _print_text(url, problems, texts, lengths)
        found += problems
    if args.format != "text":
        print_block(_render(args.format, report.sort_problems(found)))
    return 2 if any(problem.severity == "error" for problem in found) else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(
        "validate",
        "Check job documents and DeepSpeed configs.",
        (
            "dsjob validate cfg.yaml",
            "dsjob validate cfg.yaml trainer.train_batch=64 --world-size 8",
            "dsjob validate --deep --strict cfg.yaml",
            "dsjob validate +recipe=quickstart trainer.train_batch=64",
            "dsjob validate --format github configs/*.json",
            "dsjob validate --explain all",
        ),
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE|+recipe=NAME|key=value",
        help="JSON or YAML: a path, a URL, or - (standard input); with a recipe or a single job document, also "
        "overrides",
    )
    parser.add_argument(
        "--world-size",
        type=parse_count,
        metavar="N",
        help="ranks to check the batch sizes for (default: launch.nproc)",
    )
    parser.add_argument("--format", choices=report.FORMATS, default="text", help="output format (default: text)")
    parser.add_argument("--deep", action="store_true", help="import what the document names, and try one batch")
    add_arguments(parser)
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    parser.add_argument("--explain", metavar="RULE", help="explain a rule; `all` lists all rules")
    return parser.parse_intermixed_args(arguments)


def _explain(rule: str) -> None:
    names = sorted(EXPLANATIONS) if rule == "all" else [rule]
    for name in names:
        if name not in EXPLANATIONS:
            from dsjob.contract.hints import suggest

            raise UsageError(
                f"unknown rule {name!r}", hint=suggest(name, list(EXPLANATIONS)) or "--explain all lists the rules"
            )
        level = RULES[name].severity if name in RULES else ""
        print_lines(f"{name}{f' ({level})' if level else ''}: {EXPLANATIONS[name]}")


def _print_text(url: str, problems: list[Problem], texts: Mapping[str, str], lengths: list[str]) -> None:
    for problem in problems:
        stream = sys.stderr if problem.severity == "error" else sys.stdout
        shown = texts.get(problem.source) if stream.isatty() else None
        print_block(report.to_text(problem, shown), stream)
    if not any(problem.severity == "error" for problem in problems):
        print_lines(f"{name_source(url)}: {_conclude(problems)}", *(f"  {length}" for length in lengths))


def _conclude(warnings: list[Problem]) -> str:
    """The last line on a document without errors: whether a run on this machine would start."""
    counted = report.count_problems(warnings)
    rules = {warning.rule for warning in warnings}
    if "not-found" in rules:
        return f"valid, {counted}, but dsjob run cannot import all of its targets on this machine"
    return f"ok, {counted}" if counted else "ok"


def _render(form: str, problems: list[Problem]) -> str:
    if form == "json":
        return report.to_json(problems)
    if form == "github":
        return report.to_github(problems)
    from dsjob import __version__

    return report.to_sarif(problems, __version__)
