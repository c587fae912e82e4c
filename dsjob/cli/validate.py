"""`dsjob validate`: every problem of every document at once, without Hydra and without torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsjob import document as documents
from dsjob import storage
from dsjob.cli import parse_count
from dsjob.cli.overrides import is_override
from dsjob.cli.refused import require_own
from dsjob.cli.trusted import (
    add_arguments,
    config_path,
    grant,
    list_untrusted,
    place_origins,
    read_config,
    read_environment,
)
from dsjob.contract import report
from dsjob.contract.locations import NEVER_GRANTED
from dsjob.contract.rules import EXPLANATIONS, RULES
from dsjob.contract.secrets import list_texts
from dsjob.document import Document, resolve
from dsjob.document.job_file import require_job_file
from dsjob.document.origins import STDIN, Composed, is_deepspeed, read_text, settle
from dsjob.errors import DocumentError, DsjobError, Problem, UsageError, limit_problems
from dsjob.run_folder import RESOLVED_NAME, describe_other_job, list_commits


def main(arguments: list[str], debug: bool) -> int:
    """Prints the problems; 0 where there is no error, 2 where there is."""
    args = _parse(arguments)
    if args.explain is not None:
        _explain(args.explain)
        return 0
    overrides = [word for word in args.files if is_override(word)]
    args.files = [word for word in args.files if word not in overrides]
    if not args.files:
        hint = f"dsjob show {' '.join(overrides)} checks a recipe" if overrides else "dsjob validate cfg.json"
        raise UsageError("dsjob validate needs a file", hint=f"{hint}; - reads standard input")
    if overrides and len(args.files) > 1:
        raise UsageError(f"overrides go with one document, not with {len(args.files)}", hint=f"first: {overrides[0]}")
    read_config(config_path())  # what is wrong there is wrong with no document
    found: list[Problem] = []
    for url in args.files:
        problems, texts = validate(url, args.world_size, args if args.deep else None, overrides)
        if args.strict:
            problems = [replace(problem, severity="error") for problem in problems]
        if args.format == "text":
            _print_text(url, problems, texts)
        found += problems
    if args.format != "text":
        print(_render(args.format, report.sort_problems(found)))  # noqa: T201
    return 2 if any(problem.severity == "error" for problem in found) else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dsjob validate", description="Check job documents and DeepSpeed configs.")
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE|key=value",
        help="JSON or YAML: a path, a URL, or - (standard input); with one job document also overrides",
    )
    parser.add_argument(
        "--world-size", type=parse_count, metavar="N", help="ranks to check the batch sizes for (launch.nproc)"
    )
    parser.add_argument("--format", choices=report.FORMATS, default="text", help="how to print problems (text)")
    parser.add_argument("--deep", action="store_true", help="import what the document names, and check its arguments")
    add_arguments(parser)
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--explain", metavar="RULE", help="explain RULE; `all` lists the rules")
    return parser.parse_intermixed_args(arguments)


def _explain(rule: str) -> None:
    names = sorted(EXPLANATIONS) if rule == "all" else [rule]
    for name in names:
        if name not in EXPLANATIONS:
            from dsjob.contract.check import suggest

            raise UsageError(
                f"there is no rule {name!r}", hint=suggest(name, list(EXPLANATIONS)) or "--explain all lists them"
            )
        level = RULES[name].severity if name in RULES else ""
        print(f"{name}{f' ({level})' if level else ''}: {EXPLANATIONS[name]}")  # noqa: T201


def _print_text(url: str, problems: list[Problem], texts: Mapping[str, str]) -> None:
    for problem in problems:
        stream = sys.stderr if problem.severity == "error" else sys.stdout
        shown = texts.get(problem.source) if stream.isatty() else None
        print(report.to_text(problem, shown), file=stream, flush=True)  # or two streams in one log change places
    errors = any(problem.severity == "error" for problem in problems)
    if not errors:
        counted = report.count_problems(problems)
        print(f"{_name(url)}: ok{f', {counted}' if counted else ''}", flush=True)  # noqa: T201


def _render(form: str, problems: list[Problem]) -> str:
    if form == "json":
        return report.to_json(problems)
    if form == "github":
        return report.to_github(problems)
    from dsjob import __version__

    return report.to_sarif(problems, __version__)


def _name(url: str) -> str:
    return STDIN if url == "-" else url


def validate(
    url: str, world_size: int | None, deep: argparse.Namespace | None = None, overrides: Sequence[str] = ()
) -> tuple[list[Problem], dict[str, str]]:
    """The problems of one document with `overrides` and of what it builds on, in the order of their places; the texts
    by source.

    `deep`: the flags of trust with which targets are imported and their arguments checked; None leaves them alone.
    """
    texts: dict[str, str] = {}
    problems: list[Problem] = []
    try:
        if os.path.isdir(url):
            raise UsageError("is a folder, not a file", hint=f"dsjob validate {os.path.join(url, RESOLVED_NAME)}")
        text, source = read_text(url), _name(url)
        texts[source] = text.replace("\r\n", "\n").replace("\r", "\n")
        document = documents.require_few(documents.parse_open(text, source))
        texts[source] = document.text
        problems += document.duplicates
        problems += _check(document, world_size, texts, deep, overrides)
    except DocumentError as error:
        problems += [*error.problems, *error.warnings]
    except DsjobError as error:
        problems.append(Problem(error.message, rule="unreadable", hint=error.hint, source=_name(url)))
    return limit_problems(report.sort_problems(problems)), texts


def _check(
    document: Document,
    world_size: int | None,
    texts: dict[str, str],
    deep: argparse.Namespace | None,
    overrides: Sequence[str],
) -> list[Problem]:
    require_own(document)
    if is_deepspeed(document.value):
        if overrides:
            message, hint = f"{overrides[0]} is an override of a job document", "this is a DeepSpeed config: edit it"
            return [Problem(message, (), "override", hint, document.source)]
        return resolve.check_bare_config(document.value, world_size=world_size, locate=_locator(document))
    require_job_file(document)
    composed, unread = _compose(document, overrides)
    if composed.deepspeed is not None:
        texts[composed.deepspeed.source] = composed.deepspeed.text
    ranks, ranks_from = resolve.choose_world_size(composed.document, composed.locate, asked=world_size)
    try:
        done = resolve.resolve_job(composed.document, world_size=ranks, locate=composed.locate, ranks_from=ranks_from)
    except DocumentError as error:
        # What a config says that could not be read may be what is missing here.
        known = [problem for problem in error.problems if not (unread and problem.rule in _LEFT_TO_CONFIG)]
        wrong = {problem.path for problem in known}
        named = _look_at_targets(composed, composed.document, document, deep)
        return [*known, *unread, *error.warnings, *(one for one in named if one.path not in wrong)]
    found = unread + done.warnings + _look_at_targets(composed, done.document, document, deep)
    return found + resolve.place_problems(_find_other_job(done.document), composed.locate)


def _look_at_targets(
    composed: Composed, resolved: dict[str, Any], document: Document, deep: argparse.Namespace | None
) -> list[Problem]:
    """What a run without flags refuses: a warning where a flag could allow it. `deep`: what a run with these flags
    refuses, and what is wrong with the targets that it would import."""
    trust = grant(document, deep)
    found = list_untrusted(composed, resolved, trust)
    if deep is None:
        return [one if one.rule in NEVER_GRANTED else replace(one, severity="warning") for one in found]
    from dsjob.cli.deep import check_targets  # imports what runs need

    return found + place_origins(check_targets(resolved, trust, {one.path for one in found}), composed)


def _find_other_job(document: dict[str, Any]) -> list[Problem]:
    folder = os.path.expanduser(document["output"]["dir"])
    kept_here = storage.is_local(document["checkpoint"].get("dir") or folder)  # or listing them opened a connection
    try:
        there = kept_here and os.path.isdir(folder) and list_commits(folder, document)
        other = describe_other_job(folder, document) if there else ""
    except (DsjobError, ValueError):  # what lies there is no run's
        return []
    return [Problem(other, ("output", "dir"), "another-job", "choose another output.dir")] if other else []


_LEFT_TO_CONFIG = ("batch", "no-total-steps")


def _compose(document: Document, overrides: Sequence[str]) -> tuple[Composed, list[Problem]]:
    """The document as composed, without a DeepSpeed config that cannot be read or is not to be; and why."""
    if found := _find_remote(document):
        return _settle(_without_config(document), overrides), [found]
    try:
        return _settle(document, overrides), []
    except DocumentError as error:
        if not isinstance(document.value.get("deepspeed"), str):
            raise
        return _settle(_without_config(document), overrides), list(error.problems)


def _settle(document: Document, overrides: Sequence[str]) -> Composed:
    if not overrides and not any(isinstance(text, str) and "${" in text for _, text in list_texts(document.value)):
        return settle(document.value, file=document)
    from dsjob.document.compose import compose  # interpolations and overrides are OmegaConf's and Hydra's

    try:
        return compose(overrides, file=document, environment=read_environment())
    except UsageError as error:
        raise DocumentError([Problem(error.message, (), "override", error.hint, "command line")]) from error


def _without_config(document: Document) -> Document:
    return replace(document, value={key: value for key, value in document.value.items() if key != "deepspeed"})


def _find_remote(document: Document) -> Problem | None:
    """Nothing that a document names is fetched to check it, nor is a file of this machine read for one from a URL."""
    url = document.value.get("deepspeed")
    if not isinstance(url, str) or ("${" not in url and all(storage.is_local(u) for u in (url, document.source))):
        return None
    beside = "" if "://" in url or os.path.isabs(url) else document.source.rpartition("/")[0] + "/"
    mark = document.mark(("deepspeed",))
    return Problem(
        f"{url} is not read here: validate opens no connection",
        ("deepspeed",),
        "not-read",
        f"check it by itself: dsjob validate {beside}{url}" if "${" not in url else "",
        document.source,
        mark.line,
        mark.column,
        "warning",
    )


def _locator(document: Document) -> resolve.Locate:
    def locate(path: tuple[str | int, ...]) -> resolve.Place:
        mark = document.mark(path)
        return document.source, mark.line, mark.column

    return locate
