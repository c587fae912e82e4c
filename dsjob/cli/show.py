"""`dsjob show`: the resolved document of a job file or recipe with overrides."""

from __future__ import annotations

import argparse
import json
import sys

from dsjob import compose as composition
from dsjob import launch
from dsjob.cli import parse_count
from dsjob.cli.run import split_source
from dsjob.resolve import read_nproc, resolve_job


def main(arguments: list[str], debug: bool) -> int:
    """Prints YAML or JSON."""
    parser = argparse.ArgumentParser(prog="dsjob show", description="Print the resolved job document.")
    parser.add_argument(
        "source", nargs="+", metavar="FILE|+recipe=NAME|key=value", help="what to compose, as for dsjob run"
    )
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with configs of your own")
    parser.add_argument(
        "--world-size", type=parse_count, metavar="N", help="ranks to resolve the batch sizes for (launch.nproc)"
    )
    args = parser.parse_intermixed_args(arguments)
    file, overrides = split_source(args.source)
    composed = composition.compose(overrides, file=file, config_dir=args.config_dir)
    world_size = args.world_size or launch.read_world_size() or read_nproc(composed.document)
    document, _ = resolve_job(composed.document, world_size=world_size, locate=composed.locate)
    if args.format == "json":
        print(json.dumps(document, indent=2))  # noqa: T201
    else:
        from dsjob.cli.output import to_yaml

        sys.stdout.write(to_yaml(document))
    return 0
