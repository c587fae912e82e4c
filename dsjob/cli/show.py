"""`dsjob show`: prints the resolved document of a job file or recipe, the origins of its values, or the difference
between two documents."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from dsjob.cli import parse_count
from dsjob.cli.flags import make_parser
from dsjob.cli.run import split_source
from dsjob.contract import schema as contract
from dsjob.contract.paths import Path
from dsjob.document import compose as composition
from dsjob.document.origins import Composed
from dsjob.document.resolve import Resolved
from dsjob.errors import UsageError
from dsjob.front.origins import find_origin, list_leaves
from dsjob.front.resolve import resolve_composed
from dsjob.terminal import print_block, print_lines
from dsjob.trust.user import read_environment


def main(arguments: list[str], debug: bool) -> int:
    """Prints YAML or JSON, or one line per value."""
    args = _parse(arguments)
    if args.diff:
        return _show_difference(args)
    composed, resolved = _resolve(args.source, args)
    if args.origins or args.changed:
        rows = list(_list_rows(composed, resolved, changed=args.changed))
        _print_rows(rows, args.format, origins=args.origins)
    elif args.format == "json":
        print_block(json.dumps(resolved.document, indent=2))
    else:
        from dsjob.cli.output import to_yaml

        print_block(to_yaml(resolved.document))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(
        "show",
        "Print the resolved job document: composed, with defaults filled in and batch sizes derived.",
        (
            "dsjob show cfg.yaml trainer.max_steps=100",
            "dsjob show +recipe=quickstart --origins",
            "dsjob show cfg.yaml --changed",
            "dsjob show --diff runs/a runs/b",
        ),
    )
    parser.add_argument(
        "source", nargs="+", metavar="FILE|FOLDER|+recipe=NAME|key=value", help="what to compose, as for dsjob run"
    )
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml", help="output format (default: yaml)")
    parser.add_argument("--origins", action="store_true", help="print where each value comes from")
    parser.add_argument("--changed", action="store_true", help="print only values that differ from the defaults")
    parser.add_argument("--diff", action="store_true", help="print how two documents or run folders differ")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with configs of your own")
    parser.add_argument(
        "--world-size",
        type=parse_count,
        metavar="N",
        help="number of ranks to resolve the batch sizes for (default: launch.nproc)",
    )
    return parser.parse_intermixed_args(arguments)


def _resolve(source: list[str], args: argparse.Namespace) -> tuple[Composed, Resolved]:
    file, overrides = split_source(source, bare=True)
    composed = composition.compose(overrides, file=file, config_dir=args.config_dir, environment=read_environment())
    return composed, resolve_composed(composed, args.world_size)


def _list_rows(composed: Composed, resolved: Resolved, *, changed: bool) -> Iterator[tuple[str, Any, str]]:
    """Path, value and origin of each value; with `changed`, only of values that differ from the defaults."""
    schema = contract.job_schema()
    for path, value in list_leaves(resolved.document, schema):
        if path[0] == "resolved":
            continue
        origin = find_origin(path, composed, resolved)
        default = contract.find_at(schema, path, resolved.document).get("default")
        if changed and (origin == "default" or value == default):
            continue
        yield ".".join(map(str, path)), value, origin + _find_status(path, resolved.document, schema)


def _find_status(path: Path, document: dict[str, Any], schema: contract.Schema) -> str:
    """A remark on a key that has no effect or is mapped to another one; otherwise empty."""
    below = contract.find_at(schema, path, document)
    status = {"no-effect": "no effect here", "mapped": "maps to"}.get(below.get("x-status", ""))
    return f" ({status}: {below.get('x-note')})" if status else ""


def _print_rows(rows: list[tuple[str, Any, str]], form: str, *, origins: bool) -> None:
    if form == "json":
        entries = [{"path": p, "value": v, **({"origin": o} if origins else {})} for p, v, o in rows]
        print_block(json.dumps(entries, indent=2))
        return
    texts = [(path, json.dumps(value, ensure_ascii=False), origin) for path, value, origin in rows]
    width = max((len(f"{path}: {text}") for path, text, _ in texts), default=0)
    for path, text, origin in texts:
        line = f"{path}: {text}"
        print_lines(f"{line:<{min(width, 70)}}  # {origin}" if origins else line)


def _show_difference(args: argparse.Namespace) -> int:
    if len(args.source) != 2:
        raise UsageError("--diff needs two documents or run folders", hint="dsjob show --diff runs/a runs/b")
    first, second = (dict(list_leaves(_resolve([source], args)[1].document, None)) for source in args.source)
    rows = [
        (".".join(map(str, path)), first.get(path), second.get(path))
        for path in dict.fromkeys([*first, *second])
        if path[0] != "resolved" and first.get(path) != second.get(path)
    ]
    if args.format == "json":
        print_block(json.dumps([{"path": path, "first": a, "second": b} for path, a, b in rows], indent=2))
        return 0
    for path, a, b in rows:
        print_lines(f"{path}: {json.dumps(a, ensure_ascii=False)} -> {json.dumps(b, ensure_ascii=False)}")
    if not rows:
        print_lines("no difference")
    return 0
