"""`dsjob import`: converts configs and launch commands of other tools to a job document."""

from __future__ import annotations

import argparse
import json
import re
import sys

from dsjob import storage
from dsjob.cli.flags import make_parser
from dsjob.errors import UsageError
from dsjob.importing.command_line import Command, Word, read_command
from dsjob.importing.gather import import_sources
from dsjob.importing.given import KINDS, MODULE, Note
from dsjob.importing.settle import Imported
from dsjob.importing.sources import SOURCE_KINDS, read_sources
from dsjob.terminal import make_printable, print_block, print_error, print_lines, quote_path

_HEADS = {
    "fill in": "to fill in",
    "mend": "to fix: dsjob validate reports these as errors",
    "conflict": "conflicts, resolved by priority: command line > Trainer arguments > accelerate > DeepSpeed",
    "not supported": "to fix: not supported by dsjob, so left out or replaced",
    "unknown": "unknown, so left out",
    "left out": "left out",
    "changed": "translated",
    "auto": 'meaning of "auto"',
}


def main(arguments: list[str], debug: bool) -> int:
    """Prints or writes the document. Notes are comments at its top; for JSON they go to standard error."""
    args, words = _parse(arguments)
    command = _read_words(words)
    found, wrong = read_sources(args.files, args.kind)
    if not args.files and command is None:
        raise UsageError("nothing to import", hint="dsjob import FILE..., or dsjob import -- deepspeed train.py ...")
    imported = import_sources(found, command, wrong)
    text = _as_json(imported) if args.format == "json" else _as_yaml(imported)
    if args.format == "json":
        print_lines(*_list_notes(imported.notes), file=sys.stderr)
    if args.output is None:
        print_block(text)
        return 0
    _write(args.output, text, args.force)
    open_ends = sum(note.kind in ("fill in", "mend", "not supported") for note in imported.notes)
    summary = f"{len(imported.notes)} notes, {open_ends} of them need your attention"
    print_error(f"{args.output}: {summary}; then run dsjob validate {quote_path(args.output)}")
    return 0


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser(
        "import",
        "Convert files of other tools to a job document. If sources contradict each other, the command line takes "
        "precedence over Trainer arguments, these over accelerate files, and all of them over a DeepSpeed config.",
        (
            "dsjob import ds_config.json",
            "dsjob import ds_config.json trainer_args.json --output job.yaml",
            "dsjob import -- deepspeed --num_gpus 8 train.py --deepspeed ds_config.json",
        ),
        usage="dsjob import [options] FILE... [-- COMMAND ...]",
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="a DeepSpeed config, Trainer arguments as JSON, a text file with the "
        "launch command, an accelerate file, or an experiment of Determined; a path, a URL, or - (standard input)"
    )  # fmt: skip
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml", help="output format (default: yaml)")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the document to this file")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--kind", choices=SOURCE_KINDS, help="the type of FILEs that cannot be detected")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_intermixed_args(arguments[:cut]), arguments[cut + 1 :]


def _read_words(words: list[str]) -> Command | None:
    if not words:
        return None
    command = read_command([Word(word, "command line") for word in words])
    if command is None:
        hint = "it must start with deepspeed, torchrun, accelerate launch or python"
        raise UsageError(f"not a launch command: {' '.join(words)[:60]}", hint=hint)
    return command


def _list_notes(notes: tuple[Note, ...]) -> list[str]:
    """The notes, grouped by kind under headings."""
    lines = []
    for kind in KINDS:
        of_kind = [note for note in notes if note.kind == kind]
        if of_kind:
            lines.append(f"{_HEADS[kind]}:")
            lines += [f"  {note.place}: {note.message}" if note.place else f"  {note.message}" for note in of_kind]
    return [make_printable(line) for line in lines]  # other characters than a newline also end a YAML comment


def _as_yaml(imported: Imported) -> str:
    from dsjob.cli.output import to_yaml

    text = to_yaml(imported.document)
    marked = re.sub(rf"(_target_: {MODULE}\.\w+)$", r"\1  # placeholder", text, flags=re.MULTILINE)
    notes = [f"# {line}" for line in _list_notes(imported.notes)]
    return "\n".join(["# Made by dsjob import.", *notes, "", marked])


def _as_json(imported: Imported) -> str:
    return json.dumps(imported.document, indent=2, ensure_ascii=False) + "\n"


def _write(url: str, text: str, force: bool) -> None:
    if force:
        storage.write_bytes(url, text.encode())
        return
    try:
        storage.create_bytes(url, text.encode())
    except FileExistsError:
        raise UsageError(f"{url} already exists", hint="--force overwrites it") from None
