"""`dsjob runs`: lists runs, and compares two of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dsjob.cli.ckpt_text import align, show_age
from dsjob.cli.flags import make_parser
from dsjob.planning.plot import spark
from dsjob.terminal import make_printable, print_block

if TYPE_CHECKING:
    from dsjob.front.runs import Compared, RunInfo

_SORTS = ("age", "name", "status", "step", "metric")
_WIDTH = 12  # characters of a curve


def main(arguments: list[str], debug: bool) -> int:
    """Lists runs, or with `diff` as the first word, compares two."""
    if arguments[:1] == ["diff"]:
        return _diff(arguments[1:])
    parser = make_parser(
        "runs",
        "List the runs in a folder and below it: status, step, metric, age and a curve of the loss. "
        "`dsjob runs diff A B` compares two.",
        ("dsjob runs", "dsjob runs outputs/quickstart --sort metric", "dsjob runs diff outputs/a outputs/b"),
    )
    parser.add_argument("dir", nargs="?", default="outputs", metavar="DIR", help="folder of runs (default: outputs)")
    parser.add_argument("--sort", choices=_SORTS, default="age", help="order of the runs (default: age)")
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    from dsjob.front.runs import list_runs

    runs = _sort(list_runs(args.dir), args)
    listed = json.dumps([dataclasses.asdict(run) for run in runs], indent=2) if args.json else show_runs(runs, args.dir)
    print_block(listed)
    return 0


def _sort(runs: list[RunInfo], args: argparse.Namespace) -> list[RunInfo]:
    keys: dict[str, Callable[[RunInfo], Any]] = {
        "age": lambda run: -run.updated,
        "name": lambda run: run.name,
        "status": lambda run: run.status,
        "step": lambda run: -1 if run.step is None else run.step,
        "metric": lambda run: (run.metric, float("inf") if _choose(run) is None else _choose(run)),
    }
    return sorted(runs, key=keys[args.sort], reverse=args.reverse)


def _choose(run: RunInfo) -> float | None:
    return run.last if run.best is None else run.best


def show_runs(runs: Sequence[RunInfo], folder: str) -> str:
    """One line for each run."""
    from dsjob.front.runs import describe_age

    if not runs:
        return make_printable(f"no runs in {folder}")
    rows = [("name", "status", "step", "metric", "age", "loss", "folder")]
    for run in runs:
        value = _choose(run)
        shown = "" if value is None else f"{'best ' if run.best is not None else ''}{run.metric} {value:.4g}"
        step = "" if run.step is None else f"{run.step}/{run.max_steps}" if run.max_steps else str(run.step)
        curve = spark(run.losses, _WIDTH)
        rows.append((run.name, run.status, step, shown, show_age(describe_age(run)), curve, run.folder))
    return align(rows)


def _diff(arguments: list[str]) -> int:
    parser = make_parser(
        "runs diff",
        "Compare two runs: what differs between their documents and environments, and their last metrics.",
        ("dsjob runs diff outputs/a outputs/b", "dsjob runs diff outputs/a outputs/b --json"),
    )
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="the folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    from dsjob.front.runs import compare_runs

    found = compare_runs(args.a, args.b)
    shown = json.dumps(dataclasses.asdict(found), indent=2) if args.json else show_compared(found, args.a, args.b)
    print_block(shown)
    return 0


def show_compared(found: Compared, first: str, second: str) -> str:
    """The differences of the documents and the environments, and the metrics, side by side."""
    rows: list[tuple[str, ...]] = [("", first, second)]
    rows += [(path, *map(_show_value, pair)) for path, pair in found.document.items()]
    if not found.document:
        rows.append(("the documents are equal", "", ""))
    rows += [(path, *map(_show_value, pair)) for path, pair in found.environment.items()]
    rows += [(name, *map(_show_number, pair)) for name, pair in found.metrics.items()]
    return align(rows)


def _show_value(value: Any) -> str:
    text = "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _show_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else ""
