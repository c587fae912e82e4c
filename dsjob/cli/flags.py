"""What the parsers of several commands share: examples in the help text, and the trust flags."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from dsjob.contract import locations
from dsjob.contract.hints import suggest
from dsjob.errors import UsageError
from dsjob.trust.grant import Trust
from dsjob.trust.user import Flags

_DEFAULT = "the newest, or the best if the job has checkpoint.load_best_at_end"
REST = "ARGUMENT"  # how parsers call the arguments of a program


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of printing its usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        start, _, missing = message.partition("the following arguments are required: ")
        if missing and not start:
            # argparse also lists what may be empty: the arguments of a program that dsjob runs.
            message = f"{self.prog} needs {missing.removesuffix(f', {REST}')}"
        else:
            message = f"{self.prog}: {message}"
        shown = f"{self.prog} --help shows the arguments, with examples"
        raise UsageError(message, hint=" ".join(filter(None, (self._suggest(message), shown))))

    def _suggest(self, message: str) -> str:
        """The flag that an unknown one was probably meant to be."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        return suggest(unknown, re.findall(r"--[\w-]+", self.format_help())) if unknown.startswith("--") else ""


def make_parser(command: str, description: str, examples: Sequence[str], **options: Any) -> argparse.ArgumentParser:
    """A parser for a command, whose help ends with `examples`. Its errors are UsageErrors."""
    return _Parser(prog=f"dsjob {command}", **describe(description, examples, **options))


def describe(description: str, examples: Sequence[str], *, epilog: str = "", **options: Any) -> dict[str, Any]:
    """The arguments of ArgumentParser for a help text that ends with `examples`."""
    lines = [*textwrap.wrap(epilog, 80), "", "examples:", *(f"  {line}" for line in examples)]
    return {
        "description": textwrap.fill(description, 80),
        "epilog": "\n".join(lines).lstrip(),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        **options,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags --trust, --trust-remote-code and --unpinned."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PREFIX",
        help="let the document name this module or callable; protocol:NAME: allow URLs with this protocol; "
        "folder:PLACE: let it read and write this folder or bucket",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow trust_remote_code, and weights stored as pickles"
    )
    parser.add_argument("--unpinned", action="store_true", help="allow names on a hub without a revision")


def add_form(parser: argparse.ArgumentParser) -> None:
    """The flags --quiet and --json."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quiet", "-q", action="store_true", help="print only problems")
    form.add_argument("--json", action="store_true", help="print one JSON object per line instead of text")


def add_choice(parser: argparse.ArgumentParser, purpose: str = "", default: str = _DEFAULT) -> None:
    """The flags --tag and --best, which exclude each other; see `choose_tag`."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-t", "--tag", help=f"tag of the checkpoint{purpose} (default: {default})")
    group.add_argument("--best", action="store_true", help="the best checkpoint by checkpoint.best of its job")


def read_flags(args: argparse.Namespace) -> Flags:
    """The trust flags among a command's arguments."""
    return Flags(tuple(args.trust), remote_code=args.trust_remote_code, unpinned=args.unpinned)


def allow_granted(prefixes: Sequence[str]) -> None:
    """Lets this process open what the flags grant, such as URLs of other protocols, even for the job file itself."""
    locations.allow(lambda: Trust(prefixes=tuple(prefixes)).prefixes)
