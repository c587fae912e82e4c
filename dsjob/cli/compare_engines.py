"""`dsjob compare-engines`: runs a few steps of a job with dsjob's engine and with the installed DeepSpeed, and compares
their losses."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsjob.cli import parse_count
from dsjob.cli.flags import add_arguments, allow_granted, make_parser, read_flags
from dsjob.cli.run import split_source
from dsjob.document import compose as composition
from dsjob.document.sizes import read_nproc
from dsjob.errors import UsageError
from dsjob.front.check import check_composed
from dsjob.launch import launcher
from dsjob.terminal import print_block
from dsjob.trust.named import name_places
from dsjob.trust.user import grant, read_environment

if TYPE_CHECKING:
    from dsjob.launch.comparison import Side

# Relative differences of losses, in full and in half precision. Rounding errors add up: two correct engines differ by
# about this much after twenty steps.
_TOLERANCE, _LOW_TOLERANCE = 1e-3, 2e-2


def main(arguments: list[str], debug: bool) -> int:
    """Prints a table or JSON. Returns 0 if the losses agree, 1 if they do not."""
    args = _parse(arguments)
    if launcher.read_world_size() is not None:
        raise UsageError(
            "compare-engines starts its own ranks", hint="run it without torchrun or srun, with launch.nproc=N"
        )
    allow_granted(args.trust)
    file, overrides = split_source(args.source)
    given, environment = [*overrides, "engine=deepspeed"], read_environment()
    composed = composition.compose(given, file=file, config_dir=args.config_dir, environment=environment)
    nproc = read_nproc(composed.document)
    trust = name_places(grant(file, read_flags(args)), composed)
    resolved = check_composed(composed, trust, world_size=nproc, ranks_from="launch.nproc").require()
    from dsjob.launch.comparison import compare, find_largest_difference

    sides = compare(resolved.document, steps=args.steps, trust=trust, debug=debug)
    largest, step = find_largest_difference(sides)
    tolerance = args.tolerance if args.tolerance is not None else choose_tolerance(resolved.document)
    agree = largest <= tolerance  # also False for nan
    verdict = {"agree": agree, "tolerance": tolerance, "largest_difference": largest, "at_step": step}
    print_block(to_json(sides, verdict) if args.json else to_text(sides, verdict))
    return 0 if agree else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(
        "compare-engines",
        "Run a few steps of a job with dsjob's engine and with DeepSpeed's, and compare losses, speed and memory.",
        (
            "dsjob compare-engines cfg.yaml",
            "dsjob compare-engines cfg.yaml launch.nproc=2 --steps 50 --json",
        ),
    )
    parser.add_argument("source", nargs="+", metavar="FILE|+recipe=NAME|key=value", help="the job, as for dsjob run")
    parser.add_argument("--steps", type=parse_count, default=20, metavar="N", help="optimizer steps (default: 20)")
    parser.add_argument(
        "--tolerance",
        type=_parse_tolerance,
        metavar="X",
        help="largest relative difference of losses that counts as agreement "
        f"(default: {_TOLERANCE:g}; {_LOW_TOLERANCE:g} in half precision)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with configs of your own")
    add_arguments(parser)
    return parser.parse_intermixed_args(arguments)


def _parse_tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0 and less than 1, but is {text[:20]!r}")
    return value


def choose_tolerance(document: Mapping[str, Any]) -> float:
    """The default tolerance for a resolved job, which is larger in half precision."""
    low = any(document[section].get("enabled") for section in ("bf16", "fp16", "torch_autocast"))
    return _LOW_TOLERANCE if low else _TOLERANCE


def to_json(sides: Mapping[str, Side], verdict: Mapping[str, Any]) -> str:
    """The output of `--json`, with null for numbers that are not finite."""
    engines = {
        name: {
            "losses": [_to_number(loss) for loss in side.losses],
            "seconds_per_step": side.seconds_per_step,
            "seconds": side.seconds,
            "peak_bytes": side.peak_bytes,
        }
        for name, side in sides.items()
    }
    largest = _to_number(verdict["largest_difference"])
    return json.dumps({**verdict, "largest_difference": largest, "engines": engines}, indent=2, allow_nan=False)


def _to_number(value: float) -> float | None:
    """JSON has no nan and no inf."""
    return value if math.isfinite(value) else None


def to_text(sides: Mapping[str, Side], verdict: Mapping[str, Any]) -> str:
    """The table of losses by step, followed by time and memory."""
    ours, theirs = sides.values()
    lines = ["step" + "".join(f"{name:>14}" for name in (*sides, "difference"))]
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True), start=1):
        lines.append(f"{step:>4}{a:>14.6f}{b:>14.6f}{abs(b - a) / max(abs(a), 1e-12):>14.1e}")
    rates = "  ".join(f"{name} {side.seconds_per_step:.4f}" for name, side in sides.items())
    peaks = "  ".join(f"{name} {side.peak_bytes / 2**20:,.0f} MiB" for name, side in sides.items())
    within = "agree within" if verdict["agree"] else "differ by more than"
    largest = f"at most {verdict['largest_difference']:.1e}, in step {verdict['at_step']}"
    lines += [
        "",
        f"losses {within} {verdict['tolerance']:g}: {largest}",
        f"seconds per step (median)  {rates}  ratio {ours.seconds_per_step / theirs.seconds_per_step:.2f}",
        f"peak memory per rank       {peaks}",
    ]
    return "\n".join(lines)
