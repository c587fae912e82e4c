"""`dsjob validate`: every problem of every document at once, without Hydra and without torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from dsjob import resolve
from dsjob.cli import parse_count
from dsjob.cli.trusted import grant, list_untrusted
from dsjob.document import Document
from dsjob.errors import DocumentError, DsjobError, Problem
from dsjob.origins import Composed, is_deepspeed, read_document, settle
from dsjob.trust import require_job_file


def main(arguments: list[str], debug: bool) -> int:
    """Prints `file:line:col: message` for each problem; 0 where there is no error, 2 where there is."""
    parser = argparse.ArgumentParser(prog="dsjob validate", description="Check job documents and DeepSpeed configs.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON or YAML, a path or URL")
    parser.add_argument(
        "--world-size", type=parse_count, metavar="N", help="ranks to check the batch sizes for (launch.nproc)"
    )
    args = parser.parse_args(arguments)
    failed = False
    for url in args.files:
        problems = validate(url, args.world_size)
        errors = [problem for problem in problems if problem.severity == "error"]
        for problem in problems:
            print(problem, file=sys.stderr if problem.severity == "error" else sys.stdout)
        if not errors:
            print(f"{url}: ok")  # noqa: T201
        failed = failed or bool(errors)
    return 2 if failed else 0


def validate(url: str, world_size: int | None) -> list[Problem]:
    """The problems of one document, errors and warnings, in the order of their places."""
    try:
        document = read_document(url)
        if is_deepspeed(document.value):
            return _check_deepspeed(document, world_size or 1)
        require_job_file(document)
        composed = _compose(document)
        ranks = world_size or resolve.read_nproc(composed.document)
        resolved, problems = resolve.resolve_job(composed.document, world_size=ranks, locate=composed.locate)
        return problems + [
            replace(found, severity="warning") for found in list_untrusted(composed, resolved, grant(document))
        ]
    except DocumentError as error:
        return list(error.problems)
    except DsjobError as error:
        return [Problem(error.message, rule="unreadable", hint=error.hint)]


def _compose(document: Document) -> Composed:
    if "${" not in document.text:
        return settle(document.value, file=document)
    from dsjob.compose import compose  # interpolations are OmegaConf's

    return compose([], file=document)


def _check_deepspeed(document: Document, world_size: int) -> list[Problem]:
    def locate(path: tuple[str | int, ...]) -> resolve.Place:
        mark = document.mark(path)
        return document.source, mark.line, mark.column

    return resolve.resolve_config(document.value, world_size=world_size, locate=locate)[1]
