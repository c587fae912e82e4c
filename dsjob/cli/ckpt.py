"""`dsjob ckpt`: lists, describes, verifies, compares, copies and cleans up checkpoints."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import Any

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.root.best import choose_tag
from dsjob.cli import ckpt_text as text
from dsjob.cli.bar import show_progress
from dsjob.cli.flags import add_choice, describe, make_parser
from dsjob.errors import DsjobError, NoCheckpointError, UsageError
from dsjob.terminal import print_block, quote_path

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
EXAMPLES = {
    "ls": ("dsjob ckpt ls runs/a", "dsjob ckpt ls s3://bucket/a/checkpoints --json"),
    "info": ("dsjob ckpt info runs/a", "dsjob ckpt info runs/a --tag step-00000100 --tensors"),
    "verify": ("dsjob ckpt verify runs/a", "dsjob ckpt verify s3://bucket/a/checkpoints --all"),
    "diff": (
        "dsjob ckpt diff runs/a runs/b",
        "dsjob ckpt diff runs/a --tag step-00000100 --tag step-00000200",
        "dsjob ckpt diff runs/a --best",
        "dsjob ckpt diff runs/a weights.safetensors",
    ),
    "gc": ("dsjob ckpt gc runs/a --dry-run", "dsjob ckpt gc runs/a --older-than 7d"),
    "copy": ("dsjob ckpt copy runs/a s3://bucket/a", "dsjob ckpt copy --best runs/a best"),
}


def main(arguments: list[str], debug: bool) -> int:
    """Runs a subcommand. Also returns 1 if `verify` finds damage or `diff` finds a difference."""
    args = parse_arguments(arguments)
    try:
        code: int = args.action(args)
    except NoCheckpointError as error:
        hint = _hint_at_others(args.ckpt) if "ckpt" in args else ""
        raise NoCheckpointError(error.message, hint=hint or error.hint) from error
    return code


def _hint_at_others(url: str) -> str:
    """What to name instead of a folder in which another program keeps checkpoints; empty for any other folder."""
    from dsjob.checkpoint.other.deepspeed.folder import find_folder
    from dsjob.checkpoint.root.source import open_root

    saved = [name for name in open_root(url).names("") if re.fullmatch(r"checkpoint-\d{1,12}", name)]
    if saved:
        newest = sorted(saved, key=lambda name: int(name.rpartition("-")[2]))[-3:]
        listed = ", ".join(storage.join(url, name) for name in newest)
        return f"each checkpoint of Hugging Face's Trainer has a folder of its own, so name one: {listed}"
    try:
        found = find_folder(url) is not None
    except (layout.Problem, DsjobError):  # an unsupported or incomplete one
        found = True
    if not found:
        return ""
    return f"DeepSpeed saved this; dsjob convert {quote_path(url)} OUT reads it, and so does checkpoint.resume"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """A subcommand with its arguments; `action` runs it."""
    parser = make_parser(
        "ckpt",
        "List, describe, verify, compare, copy and clean up checkpoints.",
        (
            "dsjob ckpt ls runs/a",
            "dsjob ckpt verify runs/a",
            "dsjob ckpt diff runs/a runs/b",
            "dsjob ckpt copy runs/a s3://bucket/a",
        ),
        epilog="CKPT: a run's folder, a folder of checkpoints, or a single checkpoint in it; a path or URL",
    )
    below = parser.add_subparsers(required=True, metavar="ls|info|verify|diff|gc|copy")

    def add(name: str, action: Any, help_text: str, places: tuple[str, ...] = ("CKPT",)) -> argparse.ArgumentParser:
        description = help_text[0].upper() + help_text[1:] + "."
        made = below.add_parser(name, help=help_text, **describe(description, EXAMPLES[name]))
        made.set_defaults(action=action)
        for place in places:
            made.add_argument(
                place.lower(),
                metavar=place,
                help="a run's folder, a folder of checkpoints, or a single checkpoint; a path or URL",
            )
        made.add_argument("--json", action="store_true", help="print JSON")
        return made

    add("ls", _list, "list checkpoints: committed, damaged, partial, superseded")
    info = add("info", _describe, "show what is in a checkpoint")
    info.add_argument("--tensors", action="store_true", help="list every tensor (JSON always does)")
    verify = add("verify", _verify, "compare every byte with its digest; exit code 1 if any differs")
    verify.add_argument("--all", action="store_true", help="verify every checkpoint (default: the newest)")
    diff = add("diff", _diff, "compare tensors; exit code 0 if all are equal, otherwise 1", ("A",))
    diff.add_argument("b", nargs="?", metavar="B", help="another checkpoint, or safetensors files (default: A)")
    diff.add_argument(
        "-t", "--tag", action="append", default=[], help="tag in A; if given twice, in A and in B (default: the newest)"
    )
    diff.add_argument("--best", action="store_true", help="the best checkpoint in A; --tag is then that in B")
    gc = add("gc", _collect, "delete leftovers of killed or rewound runs")
    gc.add_argument("--dry-run", "-n", action="store_true", help="only print what would be deleted")
    gc.add_argument(
        "--older-than",
        default="1h",
        metavar="AGE",
        help="only what was last written this long ago: 90m, 2h, 7d (default: 1h)",
    )
    copy = add("copy", _copy, "copy checkpoints to another path or URL, and verify them", ("SRC", "DST"))
    for one in (info, verify, copy):
        default = "all" if one is copy else "the newest"
        add_choice(one, default=default)
    args, rest = parser.parse_known_args(arguments)
    # argparse takes an optional positional as missing if a flag comes before it: diff A --best B.
    if args.action is _diff and args.b is None and len(rest) == 1 and not rest[0].startswith("-"):
        args.b, rest = rest[0], []
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _print(value: Any) -> None:
    print_block(value if isinstance(value, str) else json.dumps(value, indent=2))


def _list(args: argparse.Namespace) -> int:
    from dsjob.checkpoint.root.inventory import take_inventory

    inventory = take_inventory(args.ckpt)
    _print(inventory.as_json() if args.json else text.show_inventory(inventory))
    return 0


def _describe(args: argparse.Namespace) -> int:
    from dsjob.checkpoint.root.inventory import describe

    found = describe(args.ckpt, choose_tag(args.ckpt, args.tag, best=args.best))
    _print(found if args.json else text.show_checkpoint(found, tensors=args.tensors))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from dsjob.checkpoint.offline.verify import verify

    if args.all and (args.tag or args.best):
        raise UsageError(
            f"--all and --{'best' if args.best else 'tag'} cannot be combined", hint="leave one of them out"
        )
    tag = choose_tag(args.ckpt, args.tag, best=args.best)
    with show_progress("verifying") as progress:
        found = verify(args.ckpt, tag, every=args.all, progress=progress)
    _print([asdict(one) for one in found] if args.json else text.show_verified(found))
    return int(any(one.damages for one in found))


def _diff(args: argparse.Namespace) -> int:
    from dsjob.checkpoint.offline.compare import compare

    tags = [*([choose_tag(args.a, None, best=True)] if args.best else []), *args.tag]
    if len(tags) > 2 or (args.b is None and not args.best and len(tags) < 2):
        raise UsageError(
            "diff needs two checkpoints",
            hint="dsjob ckpt diff A B, or dsjob ckpt diff A with --tag twice or --best",
        )
    first, second = [*tags, None, None][:2]
    with show_progress("comparing", bytes_=False) as progress:
        found = compare(args.a, args.b or args.a, tags=(first, second), progress=progress)
    _print([asdict(one) for one in found] if args.json else text.show_differences(found))
    return int(any(one.kind != "same" for one in found))


def _collect(args: argparse.Namespace) -> int:
    from dsjob.checkpoint.root.garbage import collect

    given = re.fullmatch(r"([0-9]{1,9})([smhd])", args.older_than)
    if not given:
        raise UsageError(f"--older-than {args.older_than!r} is not an age", hint="for example 90m, 2h or 7d")
    age = int(given[1]) * SECONDS[given[2]]
    root, found, uploads = collect(args.ckpt, older_than=age, dry_run=args.dry_run)
    answer = {"url": root, "dry_run": args.dry_run, "found": [asdict(one) for one in found], "uploads": uploads}
    _print(answer if args.json else text.show_garbage(root, found, uploads, dry_run=args.dry_run))
    return 0


def _copy(args: argparse.Namespace) -> int:
    from dsjob.checkpoint.offline.transfer import copy

    tag = choose_tag(args.src, args.tag, best=args.best)
    with show_progress("copying") as progress:
        found = copy(args.src, args.dst, tag=tag, progress=progress)
    _print([asdict(one) for one in found] if args.json else text.show_copied(found))
    return 0
